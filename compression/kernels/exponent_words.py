"""Words to exponents and remainders and back, as textual LLVM IR: shuffles that suit any instruction set.

A word turned left by one bit has its exponent in the highest byte and its sign in the lowest bit, so an
exponent is a byte and what remains, the mantissa and the sign, are whole bytes too.
"""

from __future__ import annotations

from .exponent_isa import BYTES, GROUP, same, vector

_AHEAD = 2048  # bytes to prefetch ahead
GOLDEN = 0x9E3779B97F4A7C15  # of 2^64: its multiples fall evenly, and with no pattern of a tensor
_HALVES = f"<{GROUP} x i16>"


def _pair(kind: str, first: str, second: str, out: str) -> str:
    """Two vectors of 64 to one of 128, in turns."""
    places = vector("i32", [lane + GROUP * side for lane in range(GROUP) for side in (0, 1)])
    return f"  %{out} = shufflevector {kind} %{first}, {kind} %{second}, <{2 * GROUP} x i32> {places}"


def _unpair(kind: str, pairs: str, first: str, second: str) -> str:
    """Undo ``_pair``."""
    text, wide = [], f"<{2 * GROUP} x {kind}>"
    for side, name in enumerate((first, second)):
        places = vector("i32", range(side, 2 * GROUP, 2))
        text.append(f"  %{name} = shufflevector {wide} %{pairs}, {wide} poison, <{GROUP} x i32> {places}")
    return "\n".join(text)


def prefetch(address: str, num_bytes: int) -> str:
    """``num_bytes`` bytes for each step %i, from ``address`` on."""
    text = f"  {address}.i = getelementptr [{num_bytes} x i8], ptr {address}, i64 %i"
    for place in range(0, num_bytes, 64):
        name = f"{address}.i{place}"
        text += f"""
  {name} = getelementptr i8, ptr {address}.i, i64 {place}
  call void @llvm.prefetch.p0(ptr {name}, i32 0, i32 3, i32 1)"""
    return text


def _each_group(body: str) -> str:
    """A loop over the groups %i of %groups."""
    return f"""
entry:
  br label %step
step:
  %i = phi i64 [0, %entry], [%i.next, %step]
{body}
  %i.next = add i64 %i, 1
  %all = icmp eq i64 %i.next, %groups
  br i1 %all, label %done, label %step, !llvm.loop !1
done:
  ret void"""


def split(bits: int, *, stream: bool) -> str:
    """Words to ``exponents``, and to remainders."""
    kind, rest, low, high = f"<{GROUP} x i{bits}>", GROUP * (bits // 8 - 1), "", "%turned"
    if bits == 32:
        high = "%high"
        low = f"""
  %halves = bitcast {kind} %turned to <{2 * GROUP} x i16>
{_unpair("i16", "halves", "low", "high")}
  store {_HALVES} %low, ptr %to, {_store(stream)}"""
    ones = same(f"i{bits}", 1, GROUP)
    body = f"""
  %from = getelementptr {kind}, ptr %words, i64 %i
  %ahead = getelementptr i8, ptr %words, i64 {_AHEAD}
{prefetch("%ahead", GROUP * bits // 8)}
  %x = load {kind}, ptr %from, align 1
  %turned = call {kind} @llvm.fshl.v{GROUP}i{bits}({kind} %x, {kind} %x, {kind} {ones})
  %to = getelementptr [{rest} x i8], ptr %remainders, i64 %i
{low}
  %pairs = bitcast {_HALVES} {high} to <{2 * GROUP} x i8>
{_unpair("i8", "pairs", "r", "e")}
  %r.to = getelementptr i8, ptr %to, i64 {rest - GROUP}
  store {BYTES} %r, ptr %r.to, {_store(stream)}
  %e.to = getelementptr {BYTES}, ptr %exponents, i64 %i
  store {BYTES} %e, ptr %e.to"""
    return f"""
define internal void @split{bits}{"s" if stream else ""}(ptr noalias %words, i64 %groups,
                                       ptr noalias %exponents, ptr noalias %remainders) noinline {{
{_each_group(body)}
}}"""


def join(bits: int, *, stream: bool) -> str:
    """Undo ``split``."""
    kind, rest = f"<{GROUP} x i{bits}>", GROUP * (bits // 8 - 1)
    low = f"  %turned = bitcast <{2 * GROUP} x i8> %pairs to {kind}"
    if bits == 32:
        low = f"""
  %high = bitcast <{2 * GROUP} x i8> %pairs to {_HALVES}
  %low = load {_HALVES}, ptr %from, align 1
{_pair(_HALVES, "low", "high", "halves")}
  %turned = bitcast <{2 * GROUP} x i16> %halves to {kind}"""
    ones = same(f"i{bits}", 1, GROUP)
    body = f"""
  %e.from = getelementptr {BYTES}, ptr %exponents, i64 %i
  %e = load {BYTES}, ptr %e.from
  %from = getelementptr [{rest} x i8], ptr %remainders, i64 %i
  %ahead = getelementptr i8, ptr %remainders, i64 {_AHEAD}
{prefetch("%ahead", rest)}
  %r.from = getelementptr i8, ptr %from, i64 {rest - GROUP}
  %r = load {BYTES}, ptr %r.from, align 1
{_pair(BYTES, "r", "e", "pairs")}
{low}
  %x = call {kind} @llvm.fshr.v{GROUP}i{bits}({kind} %turned, {kind} %turned, {kind} {ones})
  %to = getelementptr {kind}, ptr %words, i64 %i
  store {kind} %x, ptr %to, {_store(stream)}"""
    return f"""
define internal void @join{bits}{"s" if stream else ""}(ptr noalias %exponents, ptr noalias %remainders,
                                      i64 %groups, ptr noalias %words) noinline {{
{_each_group(body)}
}}"""


def _store(stream: bool) -> str:
    return "align 64, !nontemporal !0" if stream else "align 1"


def count(bits: int) -> str:
    """Exponents of runs of 64 words, at places that no regular tensor can meet."""
    return f"""
define i64 @count{bits}(ptr noalias %words, i64 %places, i64 %runs, ptr noalias %counts) {{
entry:
  br label %run
run:
  %r = phi i64 [0, %entry], [%r.next, %counted]
  %fraction = mul i64 %r, {GOLDEN}
  %fraction.wide = zext i64 %fraction to i128
  %places.wide = zext i64 %places to i128
  %scaled = mul i128 %fraction.wide, %places.wide
  %place.wide = lshr i128 %scaled, 64
  %place = trunc i128 %place.wide to i64
  %from = getelementptr i{bits}, ptr %words, i64 %place
  br label %word
word:
  %i = phi i64 [0, %run], [%i.next, %word]
  %at = getelementptr i{bits}, ptr %from, i64 %i
  %x = load i{bits}, ptr %at, align 1
  %unsigned = shl i{bits} %x, 1
  %e = lshr i{bits} %unsigned, {bits - 8}
  %e.wide = zext i{bits} %e to i64
  %slot = getelementptr i64, ptr %counts, i64 %e.wide
  %before = load i64, ptr %slot
  %after = add i64 %before, 1
  store i64 %after, ptr %slot
  %i.next = add i64 %i, 1
  %full = icmp eq i64 %i.next, {GROUP}
  br i1 %full, label %counted, label %word
counted:
  %r.next = add i64 %r, 1
  %all = icmp eq i64 %r.next, %runs
  br i1 %all, label %done, label %run
done:
  ret i64 0
}}"""
