"""What the exponent kernels do with 64 exponents at once, as textual LLVM IR for any CPU.

Shifts, masks and comparisons of whole vectors, which LLVM turns into what the CPU has; ``exponent_x86``
replaces what certain instructions do better. ``exponent_levels`` has the loops around the steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

GROUP = 64  # exponents per step
# Bits of a code of each level; they are tried in this order.
PLANS = ((1, 2, 2), (2, 2, 2), (3, 3, 3), (4, 4, 4))
NUM_LEVELS = 3
TABLE_BYTES = 16  # of one level: code to exponent
BYTES, FOURS, EIGHTS, BOOLS = "<64 x i8>", "<16 x i32>", "<8 x i64>", "<64 x i1>"


class PortableExponents:
    """A table is a few comparisons, and escapes move one by one; any little-endian CPU."""

    name = "portable"
    streams = False  # has stores past the cache
    book_bytes = TABLE_BYTES  # of one level

    def shared(self) -> str:
        """What its steps call."""
        gather = _each_set_bit("gather", source="%bit", to="%n")
        return gather + _each_set_bit("spread", source="%n", to="%bit")

    def books(self, plan: tuple[int, ...]) -> str:
        """%books, from which ``encoder`` reads: here they are %tables, 16 bytes a level, code to exponent."""
        return "  %books = getelementptr i8, ptr %tables, i64 0"

    def encoder(self, k: int) -> str:
        """What ``encode`` needs of the level's %book, before the loop."""
        return "\n".join(_splat("%book", j) for j in range(escape(k)))

    def encode(self, k: int) -> str:
        """Exponents %e to codes %c: the bits of an escape, without those that the exponent's code lacks."""
        lacking = [same("i8", escape(k) ^ j, GROUP) for j in range(escape(k))]
        wanted = [f"%splat{j}" for j in range(escape(k))]
        return f"""{_select("%e", wanted, lacking, "%lacking")}
  %c = xor {BYTES} %lacking, {same("i8", escape(k), GROUP)}"""

    def fours(self, k: int) -> str:
        """Codes %c to %fours, words of four codes and zeros."""
        text, codes = f"  %c.words = bitcast {BYTES} %c to {FOURS}", "%c.words"
        for n, fold in enumerate(_folds(k)[:2]):
            result = ("%pairs", "%fours")[n]
            text += f"""
  %shifted{n} = lshr {FOURS} {codes}, {same("i32", fold.shift, 16)}
  %folded{n} = or {FOURS} %shifted{n}, {codes}
  {result} = and {FOURS} %folded{n}, {same("i32", fold.together & 0xFFFFFFFF, 16)}"""
            codes = result
        return text

    def codes(self, k: int) -> str:
        """%eights, words of eight codes and zeros, to codes %c."""
        text, codes = "", "%eights"
        for n, fold in enumerate(reversed(_folds(k))):
            text += f"""
  %shifted{n} = shl {EIGHTS} {codes}, {same("i64", fold.shift, 8)}
  %folded{n} = or {EIGHTS} %shifted{n}, {codes}
  %apart{n} = and {EIGHTS} %folded{n}, {same("i64", fold.apart, 8)}"""
            codes = f"%apart{n}"
        return f"{text}\n  %c = bitcast {EIGHTS} {codes} to {BYTES}"

    def decoder(self, k: int) -> str:
        """What ``decode`` needs of the level's %table, before the loop."""
        return "\n".join(_splat("%table", j) for j in range(escape(k)))

    def decode(self, k: int) -> str:
        """Codes %c to exponents %known, and zeros for escapes."""
        codes = [same("i8", j, GROUP) for j in range(escape(k))]
        return _select("%c", codes, [f"%splat{j}" for j in range(escape(k))], "%known")

    def gather(self) -> str:
        """The escapes of %mask (also %escapes) among those at %from (also %e) to %to, not behind %from.

        It may write 64 bytes, whatever the mask.
        """
        return "  call void @gather(ptr %from, i64 %mask, ptr %to)"

    def spread(self) -> str:
        """%known to %to, and the escapes of %mask (also %escapes) from %from.

        It may read 64 bytes, whatever the mask.
        """
        return f"  store {BYTES} %known, ptr %to\n  call void @spread(ptr %from, i64 %mask, ptr %to)"


def plan_name(plan: tuple[int, ...]) -> str:
    """The bits of a code of each level, as kernels are called."""
    return "".join(map(str, plan))


def escape(k: int) -> int:
    """The code of ``k`` bits that stands for no exponent."""
    return (1 << k) - 1


def vector(kind: str, values: Iterable[int]) -> str:
    """A constant vector."""
    return "<" + ", ".join(f"{kind} {value}" for value in values) + ">"


def same(kind: str, value: int, lanes: int) -> str:
    """A constant vector of one value."""
    return vector(kind, [value] * lanes)


def _splat(table: str, j: int) -> str:
    """Byte j of a table, 64 times."""
    return f"""
  %entry.at{j} = getelementptr i8, ptr {table}, i64 {j}
  %entry{j} = load i8, ptr %entry.at{j}
  %one{j} = insertelement {BYTES} poison, i8 %entry{j}, i64 0
  %splat{j} = shufflevector {BYTES} %one{j}, {BYTES} poison, <64 x i32> zeroinitializer"""


def _select(name: str, wanted: list[str], values: list[str], result: str) -> str:
    """The value for which ``name`` is what is wanted, else zero."""
    text, found = "", "zeroinitializer"
    for j, (key, value) in enumerate(zip(wanted, values, strict=True)):
        last = result if j + 1 == len(wanted) else f"%selected{j}"
        text += f"""
  %is{j} = icmp eq {BYTES} {name}, {key}
  %all{j} = sext {BOOLS} %is{j} to {BYTES}
  %value{j} = and {BYTES} %all{j}, {value}
  {last} = or {BYTES} {found}, %value{j}"""
        found = last
    return text


class _Fold(NamedTuple):
    """Neighbours come together: how far the second moves, and the bits of both together and apart."""

    shift: int
    together: int
    apart: int


def _folds(k: int) -> list[_Fold]:
    """From codes of ``k`` bits, a byte each, to pairs, fours and eights."""
    return [_Fold(n * (8 - k), _every(16 * n, 2 * n * k), _every(8 * n, n * k)) for n in (1, 2, 4)]


def _every(period: int, bits: int) -> int:
    """A word of 64 bits with the lowest ``bits`` of each ``period`` set."""
    return sum(((1 << bits) - 1) << place for place in range(0, 64, period))


def _each_set_bit(name: str, *, source: str, to: str) -> str:
    """A byte moves for each set bit of a mask: %bit is its place, %n the number of those before."""
    return f"""
define internal void @{name}(ptr %source, i64 %mask, ptr %out) {{
entry:
  br label %more
more:
  %left = phi i64 [%mask, %entry], [%rest, %move]
  %n = phi i64 [0, %entry], [%n.next, %move]
  %none = icmp eq i64 %left, 0
  br i1 %none, label %done, label %move
move:
  %bit = call i64 @llvm.cttz.i64(i64 %left, i1 true)
  %from = getelementptr i8, ptr %source, i64 {source}
  %byte = load i8, ptr %from
  %to = getelementptr i8, ptr %out, i64 {to}
  store i8 %byte, ptr %to
  %less = sub i64 %left, 1
  %rest = and i64 %left, %less
  %n.next = add i64 %n, 1
  br label %more
done:
  ret void
}}"""
