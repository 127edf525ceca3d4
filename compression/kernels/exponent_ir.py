"""The exponent kernels as textual LLVM IR: loops over blocks around the steps of an instruction set.

    pack{N}_{P}    (words, groups, tables, codes, remainders, offsets, tail, start, limit) -> end of the tail,
                   or -1: a block would begin behind ``limit``
    unpack{N}_{P}  (codes, remainders, offsets, tail, start, count, groups, tables, out) -> end of the tail,
                   or -1: codes, tail and offsets disagree, or pass ``count``
    count{N}       (words, places, runs, counts) -> 0: adds the exponents of so many runs of 64 words to 256
                   u64; a run begins at one of the first ``places`` words

N is the bits of a word, P those of the codes of each level; ``compression.exponent`` has the layout, with
one address per section. ``groups`` is how many times 64 words there are, at least one; all blocks but the
last have 64 such groups. ``start`` is where in the tail the first block begins, ``count`` is the length of
the whole tail. ``packs`` and ``unpacks`` take the same and store past the cache, with remainders and out at a
multiple of 64; other addresses need no alignment. pack writes up to ``BLOCK_TAIL_BYTES`` behind ``limit``.
Nothing outside the sections is read or written, whatever they hold.
"""

from __future__ import annotations

from itertools import product

from ..frame import BLOCK
from .exponent_isa import GROUP, PLANS, PortableExponents, plan_name
from .exponent_levels import restore, restore_block, shorten, shorten_block
from .exponent_words import count, join, split

WORD_BITS = (16, 32)
BLOCK_TAIL_BYTES = 8 + max(sum(plan[1:]) for plan in PLANS) * BLOCK // 8 + BLOCK

_GROUPS = BLOCK // GROUP
_SCRATCH = f"[{BLOCK + GROUP} x i8]"  # exponents of a block, and what a step writes or reads behind them


def _pack(isa: PortableExponents, bits: int, plan: tuple[int, ...], *, stream: bool) -> str:
    rest, s, name = GROUP * (bits // 8 - 1), "s" if stream else "", plan_name(plan)
    return f"""
define i64 @pack{s}{bits}_{name}(ptr noalias %words, i64 %groups, ptr noalias %tables, ptr noalias %codes,
                              ptr noalias %remainders, ptr noalias %offsets, ptr noalias %tail, i64 %start,
                              i64 %limit) {{
entry:
  %exponents = alloca {_SCRATCH}, align 64
{isa.books(plan)}
  br label %block
block:
  %b = phi i64 [0, %entry], [%b.next, %go]
  %first = phi i64 [0, %entry], [%last, %go]
  %begin = phi i64 [%start, %entry], [%end, %go]
  %fits = icmp ule i64 %begin, %limit
  br i1 %fits, label %go, label %bad
go:
  %left = sub i64 %groups, %first
  %here = call i64 @llvm.umin.i64(i64 %left, i64 {_GROUPS})
  %last = add i64 %first, %here
  %num = mul i64 %here, {GROUP}
  %words.at = getelementptr [{GROUP} x i{bits}], ptr %words, i64 %first
  %words.ahead = getelementptr [{BLOCK} x i{bits}], ptr %words.at, i64 1
  %codes.at = getelementptr [{8 * plan[0]} x i8], ptr %codes, i64 %first
  %remainders.at = getelementptr [{rest} x i8], ptr %remainders, i64 %first
  %tail.at = getelementptr i8, ptr %tail, i64 %begin
  call void @split{bits}{s}(ptr %words.at, i64 %here, ptr %exponents, ptr %remainders.at)
  %length = call i64 @shorten_block{name}(ptr %exponents, i64 %num, ptr %codes.at, ptr %tail.at, ptr %tables,
                                       ptr %books, ptr %words.ahead)
  %end = add i64 %begin, %length
  %offset = getelementptr i64, ptr %offsets, i64 %b
  store i64 %end, ptr %offset, align 1
  %b.next = add i64 %b, 1
  %all = icmp eq i64 %last, %groups
  br i1 %all, label %done, label %block
done:
  {_fence(stream)}
  ret i64 %end
bad:
  {_fence(stream)}
  ret i64 -1
}}"""


def _unpack(bits: int, plan: tuple[int, ...], *, stream: bool) -> str:
    rest, s, name = GROUP * (bits // 8 - 1), "s" if stream else "", plan_name(plan)
    return f"""
define i64 @unpack{s}{bits}_{name}(ptr noalias %codes, ptr noalias %remainders, ptr noalias %offsets,
                                ptr noalias %tail, i64 %start, i64 %count, i64 %groups, ptr noalias %tables,
                                ptr noalias %out) {{
entry:
  %exponents = alloca {_SCRATCH}, align 64
  %other = alloca {_SCRATCH}, align 64
  br label %block
block:
  %b = phi i64 [0, %entry], [%b.next, %right]
  %first = phi i64 [0, %entry], [%last, %right]
  %begin = phi i64 [%start, %entry], [%end, %right]
  %offset = getelementptr i64, ptr %offsets, i64 %b
  %end = load i64, ptr %offset, align 1
  %size = sub i64 %end, %begin
  %ascends = icmp ule i64 %begin, %end
  %ends = icmp ule i64 %end, %count
  %enough = icmp uge i64 %size, 8
  %inside = and i1 %ascends, %ends
  %sound = and i1 %inside, %enough
  br i1 %sound, label %go, label %bad
go:
  %left = sub i64 %groups, %first
  %here = call i64 @llvm.umin.i64(i64 %left, i64 {_GROUPS})
  %last = add i64 %first, %here
  %num = mul i64 %here, {GROUP}
  %codes.at = getelementptr [{8 * plan[0]} x i8], ptr %codes, i64 %first
  %remainders.at = getelementptr [{rest} x i8], ptr %remainders, i64 %first
  %tail.at = getelementptr i8, ptr %tail, i64 %begin
  %out.at = getelementptr [{GROUP} x i{bits}], ptr %out, i64 %first
  %agrees = call i1 @restore_block{name}(ptr %codes.at, ptr %tail.at, i64 %size, i64 %num, ptr %tables,
                                      ptr %other, ptr %exponents, ptr %remainders.at)
  br i1 %agrees, label %right, label %bad
right:
  call void @join{bits}{s}(ptr %exponents, ptr %remainders.at, i64 %here, ptr %out.at)
  %b.next = add i64 %b, 1
  %all = icmp eq i64 %last, %groups
  br i1 %all, label %done, label %block
done:
  {_fence(stream)}
  ret i64 %end
bad:
  {_fence(stream)}
  ret i64 -1
}}"""


def _fence(stream: bool) -> str:
    return "call void @llvm.x86.sse.sfence()" if stream else ""


_SHARED = """
declare i64 @llvm.ctpop.i64(i64)
declare i64 @llvm.cttz.i64(i64, i1)
declare i64 @llvm.umin.i64(i64, i64)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare <64 x i16> @llvm.fshl.v64i16(<64 x i16>, <64 x i16>, <64 x i16>)
declare <64 x i16> @llvm.fshr.v64i16(<64 x i16>, <64 x i16>, <64 x i16>)
declare <64 x i32> @llvm.fshl.v64i32(<64 x i32>, <64 x i32>, <64 x i32>)
declare <64 x i32> @llvm.fshr.v64i32(<64 x i32>, <64 x i32>, <64 x i32>)
!0 = !{i32 1}
!1 = distinct !{!1, !2}
!2 = !{!"llvm.loop.unroll.disable"}

define internal i64 @groups(i64 %num) {
  %more = add i64 %num, 63
  %groups = lshr i64 %more, 6
  ret i64 %groups
}"""


def module(isa: PortableExponents) -> tuple[str, list[str]]:
    """The text of all kernels of an instruction set, and their names."""
    text, names = [_SHARED, isa.shared()], []
    if isa.streams:
        text.append("declare void @llvm.x86.sse.sfence()")
    for k in sorted({k for plan in PLANS for k in plan}):
        text += [shorten(isa, k), restore(isa, k)]
    for plan in PLANS:
        text += [shorten_block(isa, plan), restore_block(plan)]
    for bits in WORD_BITS:
        text.append(count(bits))
        names.append(f"count{bits}")
    for bits, stream in product(WORD_BITS, (False, True) if isa.streams else (False,)):
        text += [split(bits, stream=stream), join(bits, stream=stream)]
        for plan in PLANS:
            text += [_pack(isa, bits, plan, stream=stream), _unpack(bits, plan, stream=stream)]
            names += [f"{verb}{'s' if stream else ''}{bits}_{plan_name(plan)}" for verb in ("pack", "unpack")]
    return "\n".join(text), names
