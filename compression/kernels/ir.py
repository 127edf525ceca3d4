"""The zero-value kernels as textual LLVM IR: a loop over blocks around the steps of an instruction set.

LLVM is the only compiler here, so the text below is what runs. Words are integers: comparing floats would
lose -0.0 and flush denormals.

    pack{N}    (source, blocks, bitmap, offsets, values, start) -> values before the end
    unpack{N}  (bitmap, offsets, values, start, count, blocks, out) -> values before the end,
               or -1: offsets and bitmap disagree or pass count
    stream{N}  unpack with stores past the cache; out at a multiple of 64

N is the bits of a word, ``start`` the values that stand before the first block, ``values`` and ``count``
those of the whole payload. Only whole blocks, at least one: the caller pads the last. pack writes up to 64
bytes behind its last value; nothing else is read or written outside the sections, whatever they hold. Other
addresses need no alignment.

Source: Rhu et al., Compressing DMA Engine, HPCA 2018, section 4 (zero-value compression).
"""

from __future__ import annotations

from ..frame import BLOCK
from .isa import InstructionSet, count

_AHEAD = 2048  # bytes to prefetch ahead: the hardware does not follow the value stream


def _pack(isa: InstructionSet) -> str:
    bits, lanes, mask, steps = isa.bits, isa.lanes, f"i{isa.lanes}", BLOCK // isa.lanes
    return f"""
define i64 @pack{bits}(ptr noalias %source, i64 %blocks, ptr noalias %bitmap, ptr noalias %offsets,
                       ptr noalias %values, i64 %start) {{
entry:
  br label %block
block:
  %b = phi i64 [0, %entry], [%b.next, %filled]
  %k.block = phi i64 [%start, %entry], [%next, %filled]
  %first = mul i64 %b, {steps}
  %last = add i64 %first, {steps}
  br label %step
step:
  %i = phi i64 [%first, %block], [%i.next, %step]
  %k = phi i64 [%k.block, %block], [%next, %step]
  %from = getelementptr [{lanes} x i{bits}], ptr %source, i64 %i
  %ahead = getelementptr i8, ptr %from, i64 {_AHEAD}
  call void @llvm.prefetch.p0(ptr %ahead, i32 0, i32 3, i32 1)
  %at = getelementptr i{bits}, ptr %values, i64 %k
{isa.pack_step()}
  %mask.at = getelementptr {mask}, ptr %bitmap, i64 %i
  store {mask} %mask, ptr %mask.at, align 1
  %i.next = add i64 %i, 1
  %full = icmp eq i64 %i.next, %last
  br i1 %full, label %filled, label %step, !llvm.loop !1
filled:
  %offset = getelementptr i64, ptr %offsets, i64 %b
  store i64 %next, ptr %offset, align 1
  %b.next = add i64 %b, 1
  %all = icmp eq i64 %b.next, %blocks
  br i1 %all, label %done, label %block
done:
  ret i64 %next
}}"""


def _unpack_loop(isa: InstructionSet, label: str, *, exact: bool, store: str) -> str:
    """The steps of one block from %choose to %ended; ``exact`` checks every step against the block's end."""
    bits, lanes, mask, t, back = isa.bits, isa.lanes, f"i{isa.lanes}", f"{label}.", label
    check = ""
    if exact:
        back = f"{label}.write"
        check = f"""  %{t}inside = icmp ule i64 %{t}next, %k.end
  br i1 %{t}inside, label %{back}, label %bad
{back}:"""
    return f"""{label}:
  %{t}i = phi i64 [%first, %choose], [%{t}i.next, %{back}]
  %{t}k = phi i64 [%k.block, %choose], [%{t}next, %{back}]
  %{t}mask.at = getelementptr {mask}, ptr %bitmap, i64 %{t}i
  %{t}mask = load {mask}, ptr %{t}mask.at, align 1
{count(lanes, f"{t}mask", f"{t}ones")}
  %{t}next = add i64 %{t}k, %{t}ones
{check}
  %{t}at = getelementptr i{bits}, ptr %values, i64 %{t}k
  %{t}ahead = getelementptr i8, ptr %{t}at, i64 {_AHEAD}
  call void @llvm.prefetch.p0(ptr %{t}ahead, i32 0, i32 3, i32 1)
  %{t}to = getelementptr [{lanes} x i{bits}], ptr %out, i64 %{t}i
{isa.unpack_step(t, exact=exact, store=store)}
  %{t}i.next = add i64 %{t}i, 1
  %{t}full = icmp eq i64 %{t}i.next, %last
  br i1 %{t}full, label %ended, label %{label}, !llvm.loop !1"""


def _unpack(isa: InstructionSet, *, stream: bool) -> str:
    """A block runs unchecked if 4,096 values more would still be there, else it is checked at every step."""
    name, steps = "stream" if stream else "unpack", BLOCK // isa.lanes
    store = "align 64, !nontemporal !0" if stream else "align 1"
    fence = "call void @llvm.x86.sse.sfence()" if stream else ""
    return f"""
define i64 @{name}{isa.bits}(ptr noalias %bitmap, ptr noalias %offsets, ptr noalias %values, i64 %start,
                             i64 %count, i64 %blocks, ptr noalias %out) {{
entry:
  %nothing = alloca i64
  store i64 0, ptr %nothing
  br label %block
block:
  %b = phi i64 [0, %entry], [%b.next, %right]
  %k.block = phi i64 [%start, %entry], [%k.end, %right]
  %offset = getelementptr i64, ptr %offsets, i64 %b
  %k.end = load i64, ptr %offset, align 1
  %k.most = add i64 %k.block, {BLOCK}
  %first = mul i64 %b, {steps}
  %last = add i64 %first, {steps}
  %ascends = icmp ule i64 %k.block, %k.end
  %ends = icmp ule i64 %k.end, %count
  %sound = and i1 %ascends, %ends
  br i1 %sound, label %choose, label %bad
choose:
  %fits = icmp ule i64 %k.most, %count
  br i1 %fits, label %fast, label %exact
{_unpack_loop(isa, "fast", exact=False, store=store)}
{_unpack_loop(isa, "exact", exact=True, store=store)}
ended:
  %k.found = phi i64 [%fast.next, %fast], [%exact.next, %exact.write]
  %agrees = icmp eq i64 %k.found, %k.end
  br i1 %agrees, label %right, label %bad
right:
  %b.next = add i64 %b, 1
  %all = icmp eq i64 %b.next, %blocks
  br i1 %all, label %done, label %block
done:
  {fence}
  ret i64 %k.end
bad:
  {fence}
  ret i64 -1
}}"""


def module(isa: type[InstructionSet]) -> tuple[str, list[str]]:
    """The text of all kernels of an instruction set, and their names."""
    loops, names = [], []
    shared = ["declare i64 @llvm.ctpop.i64(i64)", "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"]
    if isa.streams:
        shared.append("declare void @llvm.x86.sse.sfence()")
    for kind in map(isa, (8, 16, 32, 64)):
        shared += kind.declarations()
        loops += [_pack(kind), _unpack(kind, stream=False)]
        names += [f"pack{kind.bits}", f"unpack{kind.bits}"]
        if isa.streams:
            loops.append(_unpack(kind, stream=True))
            names.append(f"stream{kind.bits}")
    unrolled = f'!1 = distinct !{{!1, !2}}\n!2 = !{{!"llvm.loop.unroll.count", i32 {isa.unroll}}}'
    return "\n".join([*shared, *loops, "!0 = !{i32 1}", unrolled]), names
