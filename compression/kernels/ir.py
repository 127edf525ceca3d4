"""The zero-value kernels as textual LLVM IR: a loop over blocks around the steps of an instruction set.

LLVM is the only compiler here, so the text below is what runs. Words are integers: comparing floats would
lose -0.0 and flush denormals.

    pack{N}    (source, words, bitmap, offsets, values, start) -> values before the end
    packm{N}   (source, words, bitmap, values, start): the words at the set bits of a bitmap that is there,
               zeros included -> values before the end, or -1: bits beyond the last word
    unpack{N}  (bitmap, offsets, values, start, count, words, out) -> values before the end,
               or -1: bits beyond the last word, or offsets and bitmap disagree or pass count
    stream{N}  unpack with stores past the cache; out at a multiple of 64
    checksum   (bitmap, words) -> ``ZeroValue.bitmap_checksum``

N is the bits of a word, ``words`` their number, at least one; ``start`` the values that stand before the
first, ``values`` and ``count`` those of the whole payload. Only the last block may be partial: the kernels
pad it in memory of their own, and pack fills its bitmap up to a multiple of 64 bytes. pack and packm write up
to 64 bytes behind their last value; nothing else is read or written outside the sections, whatever they hold.
Other addresses need no alignment.

Source: Rhu et al., Compressing DMA Engine, HPCA 2018, section 4 (zero-value compression).
"""

from __future__ import annotations

from ..frame import BLOCK
from .blocks import BEGIN_BLOCK, BITMAP, LAST_BITMAP, NEXT_BLOCK, clear, copy, steps
from .isa import InstructionSet

_SHARED = [
    "declare i64 @llvm.ctpop.i64(i64)",
    "declare i64 @llvm.umax.i64(i64, i64)",
    "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)",
    "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
]


def _pack(isa: InstructionSet) -> str:
    bits, mask = isa.bits, f"i{isa.lanes}"
    body = f"{isa.pack_step(masked=False)}\n  store {mask} %mask, ptr %mask.at, align 1"
    return f"""
define i64 @pack{bits}(ptr noalias %source, i64 %words, ptr noalias %bitmap, ptr noalias %offsets,
                       ptr noalias %values, i64 %start) {{
entry:
  %room = alloca [{BLOCK} x i{bits}], align 64
  %bitmap.room = alloca [{BITMAP} x i8], align 64
  br label %block
block:
  %k.block = phi i64 [%start, %entry], [%next, %right]{BEGIN_BLOCK}
  %source.block = getelementptr i{bits}, ptr %source, i64 %word
  br i1 %whole, label %run, label %partial
partial:
  %num.bytes = mul i64 %left, {bits // 8}
  {clear("room", BLOCK * bits // 8)}
  {copy("room", "source.block", "num.bytes")}
  br label %run
run:
  %plain.at = phi ptr [%source.block, %block], [%room, %partial]
  %bitmap.at = phi ptr [%bitmap.block, %block], [%bitmap.room, %partial]
  br label %step
{steps(isa, body, start="%k.block", values="%values", ahead="%plain")}
ended:
  %offset = getelementptr i64, ptr %offsets, i64 %b
  store i64 %next, ptr %offset, align 1
  br i1 %whole, label %right, label %last
last:
  %left.up = add i64 %left, 511
  %left.lines = lshr i64 %left.up, 9
  %left.bytes = shl i64 %left.lines, 6
  {copy("bitmap.block", "bitmap.room", "left.bytes")}
  br label %right
{NEXT_BLOCK}
done:
  ret i64 %next
}}"""


def _pack_masked(isa: InstructionSet) -> str:
    bits, mask = isa.bits, f"i{isa.lanes}"
    body = f"  %mask = load {mask}, ptr %mask.at, align 1\n{isa.pack_step(masked=True)}"
    return f"""
define i64 @packm{bits}(ptr noalias %source, i64 %words, ptr noalias %bitmap, ptr noalias %values,
                        i64 %start) {{
entry:
  %room = alloca [{BLOCK} x i{bits}], align 64
  %bitmap.room = alloca [{BITMAP} x i8], align 64
  br label %block
block:
  %k.block = phi i64 [%start, %entry], [%next, %right]{BEGIN_BLOCK}
  %source.block = getelementptr i{bits}, ptr %source, i64 %word
  br i1 %whole, label %run, label %partial
partial:{LAST_BITMAP}
  %num.bytes = mul i64 %left, {bits // 8}
  {copy("room", "source.block", "num.bytes")}
  br i1 %clean, label %run, label %bad
run:
  %plain.at = phi ptr [%source.block, %block], [%room, %partial]
  %bitmap.at = phi ptr [%bitmap.block, %block], [%bitmap.room, %partial]
  br label %step
{steps(isa, body, start="%k.block", values="%values", ahead="%plain")}
ended:
  br label %right
{NEXT_BLOCK}
done:
  ret i64 %next
bad:
  ret i64 -1
}}"""


def _unpack(isa: InstructionSet, *, stream: bool) -> str:
    """A block reads in place if 4,096 values more would still be there, else from a copy of its own values.

    So a step may load whole vectors, whatever bitmap and offsets say.
    """
    name, bits, lanes = "stream" if stream else "unpack", isa.bits, isa.lanes
    fence = "call void @llvm.x86.sse.sfence()" if stream else ""
    body = f"  %mask = load i{lanes}, ptr %mask.at, align 1\n{isa.unpack_step(stream=stream)}"
    return f"""
define i64 @{name}{bits}(ptr noalias %bitmap, ptr noalias %offsets, ptr noalias %values, i64 %start,
                         i64 %count, i64 %words, ptr noalias %out) {{
entry:
  %room = alloca [{BLOCK} x i{bits}], align 64
  %out.room = alloca [{BLOCK} x i{bits}], align 64
  %bitmap.room = alloca [{BITMAP} x i8], align 64
  br label %block
block:
  %k.block = phi i64 [%start, %entry], [%k.end, %right]{BEGIN_BLOCK}
  %out.block = getelementptr i{bits}, ptr %out, i64 %word
  br i1 %whole, label %check, label %partial
partial:{LAST_BITMAP}
  br i1 %clean, label %check, label %bad
check:
  %bitmap.at = phi ptr [%bitmap.block, %block], [%bitmap.room, %partial]
  %plain.at = phi ptr [%out.block, %block], [%out.room, %partial]
  %offset = getelementptr i64, ptr %offsets, i64 %b
  %k.end = load i64, ptr %offset, align 1
  %num = sub i64 %k.end, %k.block
  %ascends = icmp ule i64 %num, {BLOCK}
  %ends = icmp ule i64 %k.end, %count
  %sound = and i1 %ascends, %ends
  br i1 %sound, label %choose, label %bad
choose:
  %values.block = getelementptr i{bits}, ptr %values, i64 %k.block
  %k.most = add i64 %k.block, {BLOCK}
  %fits = icmp ule i64 %k.most, %count
  br i1 %fits, label %run, label %copy
copy:
  %num.bytes = mul i64 %num, {bits // 8}
  {copy("room", "values.block", "num.bytes")}
  br label %run
run:
  %values.at = phi ptr [%values.block, %choose], [%room, %copy]
  br label %step
{steps(isa, body, start="0", values="%values.at", ahead="%packed")}
ended:
  %agrees = icmp eq i64 %next, %num
  br i1 %agrees, label %hand, label %bad
hand:
  br i1 %whole, label %right, label %last
last:
  %out.bytes = mul i64 %left, {bits // 8}
  {copy("out.block", "out.room", "out.bytes")}
  br label %right
{NEXT_BLOCK}
done:
  {fence}
  ret i64 %k.end
bad:
  {fence}
  ret i64 -1
}}"""


_CHECKSUM = """
define i64 @checksum(ptr noalias %bitmap, i64 %words) {
entry:
  %words.up = add i64 %words, 63
  %num = lshr i64 %words.up, 6
  %none = icmp eq i64 %num, 0
  br i1 %none, label %done, label %step
step:
  %i = phi i64 [0, %entry], [%i.next, %step]
  %sum = phi i64 [0, %entry], [%sum.next, %step]
  %salt = phi i64 [0, %entry], [%salt.next, %step]
  %at = getelementptr i64, ptr %bitmap, i64 %i
  %word = load i64, ptr %at, align 1
  %salt.next = add i64 %salt, u0x9E3779B97F4A7C15
  %a = add i64 %word, %salt.next
  %a.high = lshr i64 %a, 32
  %b = xor i64 %a, %a.high
  %c = mul i64 %b, u0xD6E8FEB86659FD93
  %c.high = lshr i64 %c, 32
  %d = xor i64 %c, %c.high
  %sum.next = add i64 %sum, %d
  %i.next = add i64 %i, 1
  %all = icmp eq i64 %i.next, %num
  br i1 %all, label %done, label %step
done:
  %found = phi i64 [0, %entry], [%sum.next, %step]
  %least = call i64 @llvm.umax.i64(i64 %found, i64 1)
  ret i64 %least
}"""


def module(isa: type[InstructionSet]) -> tuple[str, list[str]]:
    """The text of all kernels of an instruction set, and their names."""
    loops, names, shared = [_CHECKSUM], ["checksum"], list(_SHARED)
    if isa.streams:
        shared.append("declare void @llvm.x86.sse.sfence()")
    for kind in map(isa, (8, 16, 32, 64)):
        shared += kind.globals()
        loops += [_pack(kind), _pack_masked(kind), _unpack(kind, stream=False)]
        names += [f"pack{kind.bits}", f"packm{kind.bits}", f"unpack{kind.bits}"]
        if isa.streams:
            loops.append(_unpack(kind, stream=True))
            names.append(f"stream{kind.bits}")
    unrolled = f'!1 = distinct !{{!1, !2}}\n!2 = !{{!"llvm.loop.unroll.count", i32 {isa.unroll}}}'
    return "\n".join([*dict.fromkeys(shared), *loops, "!0 = !{i32 1}", unrolled]), names
