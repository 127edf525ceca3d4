"""What the exponent kernels do with 64 exponents at once, one instruction set per class, as textual LLVM IR.

The common parts are shifts, masks and comparisons of whole vectors, which LLVM turns into what any CPU has;
a class replaces those that its instructions do better. ``exponent_ir`` has the loops around them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

BYTES, FOURS, EIGHTS = "<64 x i8>", "<16 x i32>", "<8 x i64>"
_BOOLS = "<64 x i1>"


class Portable:
    """Any little-endian CPU: a table is a few comparisons, escapes are moved one by one."""

    name = "portable"
    streams = False
    x86 = False
    book_bytes = 16  # of one level's table as ``encode`` wants it

    def declarations(self) -> str:
        """What its steps call."""
        return ""

    def helpers(self) -> str:
        """Loops over the set bits of a mask; the escapes are few."""
        return f"{_each_set_bit('gather', to='%n', source='%bit')}\n{_each_set_bit('spread', to='%bit', source='%n')}"

    def books(self, k: int) -> str:
        """%books from %tables: 16 bytes per level, code -> exponent."""
        return "  %books = getelementptr i8, ptr %tables, i64 0"

    def load_book(self, k: int) -> str:
        """What ``encode`` needs of the level's book at %book, before the loop."""
        return "\n".join(f"{_entry('%book', j)}\n{splat(f'book{j}')}" for j in range(escape(k)))

    def load_table(self, k: int) -> str:
        """What ``decode`` needs of the level's table at %table, before the loop."""
        return "\n".join(f"{_entry('%table', j, 'book')}\n{splat(f'book{j}')}" for j in range(escape(k)))

    def encode(self, k: int) -> str:
        """Exponents %e to codes %c: the escape's bits, those of the table's code taken away."""
        text, found = "", "zeroinitializer"
        for j in range(escape(k)):
            text += f"""
  %is{j} = icmp eq {BYTES} %e, %book{j}
  %all{j} = sext {_BOOLS} %is{j} to {BYTES}
  %one{j} = and {BYTES} %all{j}, {same("i8", escape(k) ^ j, 64)}
  %found{j} = or {BYTES} {found}, %one{j}"""
            found = f"%found{j}"
        return f"{text}\n  %c = xor {BYTES} {found}, {same('i8', escape(k), 64)}"

    def decode(self, k: int) -> str:
        """Codes %c to exponents %known, those of escapes 0."""
        text, found = "", "zeroinitializer"
        for j in range(escape(k)):
            last = "known" if j + 1 == escape(k) else f"found{j}"
            text += f"""
  %is{j} = icmp eq {BYTES} %c, {same("i8", j, 64)}
  %all{j} = sext {_BOOLS} %is{j} to {BYTES}
  %one{j} = and {BYTES} %all{j}, %book{j}
  %{last} = or {BYTES} {found}, %one{j}"""
            found = f"%{last}"
        return text

    def fours(self, k: int) -> str:
        """Codes %c to %fours, sixteen words of four codes, zeros above."""
        text, codes = f"  %c.words = bitcast {BYTES} %c to {FOURS}", "%c.words"
        for n, fold in enumerate(_folds(k)[:2]):
            last = "%fours" if n else "%pairs"
            text += f"""
  %moved{n} = lshr {FOURS} {codes}, {same("i32", fold.shift, 16)}
  %folded{n} = or {FOURS} %moved{n}, {codes}
  {last} = and {FOURS} %folded{n}, {same("i32", fold.together & 0xFFFFFFFF, 16)}"""
            codes = last
        return text

    def codes(self, k: int) -> str:
        """Eight words of eight codes, %eights, zeros above, to codes %c."""
        text, codes = "", "%eights"
        for n, fold in enumerate(reversed(_folds(k))):
            text += f"""
  %moved{n} = shl {EIGHTS} {codes}, {same("i64", fold.shift, 8)}
  %folded{n} = or {EIGHTS} %moved{n}, {codes}
  %apart{n} = and {EIGHTS} %folded{n}, {same("i64", fold.apart, 8)}"""
            codes = f"%apart{n}"
        return f"{text}\n  %c = bitcast {EIGHTS} {codes} to {BYTES}"

    def gather(self) -> str:
        """The escapes among %e, which are set in %escapes and %mask, to %to; up to 64 bytes are written."""
        return "  call void @gather(ptr %from, i64 %mask, ptr %to)"

    def spread(self) -> str:
        """%known to the 64 bytes at %to, escapes filled up from %from, where 64 bytes can be read."""
        return f"  store {BYTES} %known, ptr %to, align 1\n  call void @spread(ptr %from, i64 %mask, ptr %to)"


class Avx2(Portable):
    """A table is a shuffle, and so is moving the escapes among eight bytes."""

    name = "avx2"
    streams = True
    x86 = True

    def declarations(self) -> str:
        """Shuffles, and the places of set bits for every mask of eight."""
        places = [[j for j in range(8) if mask >> j & 1] for mask in range(256)]
        gathers = [row + [128] * (8 - len(row)) for row in places]
        spreads = [[row.index(j) if j in row else 128 for j in range(8)] for row in places]
        return f"""
declare <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8>, <32 x i8>)
declare <16 x i8> @llvm.x86.ssse3.pshuf.b.128(<16 x i8>, <16 x i8>)
{_orders("gathers", gathers)}
{_orders("spreads", spreads)}"""

    def helpers(self) -> str:
        """None."""
        return ""

    def load_table(self, k: int) -> str:
        """The table twice: the shuffle sees 16 bytes at a time."""
        return f"""
  %table16 = load <16 x i8>, ptr %table, align 1
  %table32 = shufflevector <16 x i8> %table16, <16 x i8> poison, <32 x i32> {vector("i32", [*range(16)] * 2)}"""

    def decode(self, k: int) -> str:
        """Halves are shuffled and joined again."""
        text = ""
        for half in (0, 1):
            places = vector("i32", range(32 * half, 32 * half + 32))
            text += f"""
  %c{half} = shufflevector {BYTES} %c, {BYTES} poison, <32 x i32> {places}
  %e{half} = call <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8> %table32, <32 x i8> %c{half})"""
        places = vector("i32", range(64))
        return f"""{text}
  %looked.up = shufflevector <32 x i8> %e0, <32 x i8> %e1, <64 x i32> {places}
  %known = select {_BOOLS} %escapes, {BYTES} zeroinitializer, {BYTES} %looked.up"""

    def gather(self) -> str:
        """Eight bytes a step: each writes eight, over none that is still needed."""
        text = ""
        for j in range(8):
            at = "%to" if j == 0 else f"%at{j}"
            text += f"""
  %chunk.at{j} = getelementptr i8, ptr %from, i64 {8 * j}
{_move("gathers", j)}
  store <8 x i8> %sorted{j}, ptr {at}, align 1
  %at{j + 1} = getelementptr i8, ptr {at}, i64 %ones{j}"""
        return text

    def spread(self) -> str:
        """The other way round, into the zeros of %known."""
        text = ""
        for j in range(8):
            at = "%from" if j == 0 else f"%at{j}"
            text += f"""
  %chunk.at{j} = getelementptr i8, ptr {at}, i64 0
{_move("spreads", j)}
  %known{j} = shufflevector {BYTES} %known, {BYTES} poison, <8 x i32> {vector("i32", range(8 * j, 8 * j + 8))}
  %both{j} = or <8 x i8> %sorted{j}, %known{j}
  %to{j} = getelementptr i8, ptr %to, i64 {8 * j}
  store <8 x i8> %both{j}, ptr %to{j}
  %at{j + 1} = getelementptr i8, ptr {at}, i64 %ones{j}"""
        return text


class Avx512(Portable):
    """A table of 256 bytes is two shuffles, escapes are compressed in a register."""

    name = "avx512"
    streams = True
    x86 = True
    book_bytes = 256

    def declarations(self) -> str:
        """Shuffles, compress and expand."""
        name = "@llvm.x86.avx512"
        return f"""
declare {BYTES} {name}.vpermi2var.qi.512({BYTES}, {BYTES}, {BYTES})
declare {BYTES} {name}.pshuf.b.512({BYTES}, {BYTES})
declare <32 x i16> {name}.pmaddubs.w.512({BYTES}, {BYTES})
declare {FOURS} {name}.pmaddw.d.512(<32 x i16>, <32 x i16>)
declare {BYTES} {name}.pmultishift.qb.512({BYTES}, {BYTES})
declare {BYTES} {name}.mask.compress.v64i8({BYTES}, {BYTES}, {_BOOLS})
declare {BYTES} {name}.mask.expand.v64i8({BYTES}, {BYTES}, {_BOOLS})"""

    def helpers(self) -> str:
        """None."""
        return ""

    def books(self, k: int) -> str:
        """The other way round: 256 bytes per level, exponent -> code."""
        text = f"  %books = alloca [{3 * 256} x i8], align 64"
        for place in range(0, 3 * 256, 64):
            text += f"\n  %books{place} = getelementptr i8, ptr %books, i64 {place}"
            text += f"\n  store {BYTES} {same('i8', escape(k), 64)}, ptr %books{place}"
        for level in range(3):
            for j in range(escape(k)):
                name = f"{level}.{j}"
                text += f"""
  %entry.at{name} = getelementptr i8, ptr %tables, i64 {16 * level + j}
  %entry{name} = load i8, ptr %entry.at{name}
  %entry.wide{name} = zext i8 %entry{name} to i64
  %code.at{name} = getelementptr i8, ptr %books{256 * level}, i64 %entry.wide{name}
  store i8 {j}, ptr %code.at{name}"""
        return text

    def load_book(self, k: int) -> str:
        """Four registers."""
        text = ""
        for j in range(4):
            text += f"\n  %book.at{j} = getelementptr i8, ptr %book, i64 {64 * j}"
            text += f"\n  %book{j} = load {BYTES}, ptr %book.at{j}"
        return text

    def load_table(self, k: int) -> str:
        """The table four times: the shuffle sees 16 bytes at a time."""
        return f"""
  %table16 = load <16 x i8>, ptr %table, align 1
  %table64 = shufflevector <16 x i8> %table16, <16 x i8> poison, <64 x i32> {vector("i32", [*range(16)] * 4)}"""

    def encode(self, k: int) -> str:
        """One shuffle per half of the table; the exponent's highest bit chooses between them."""
        lookup = f"call {BYTES} @llvm.x86.avx512.vpermi2var.qi.512"
        return f"""
  %low = {lookup}({BYTES} %book0, {BYTES} %e, {BYTES} %book1)
  %high = {lookup}({BYTES} %book2, {BYTES} %e, {BYTES} %book3)
  %upper = icmp slt {BYTES} %e, zeroinitializer
  %c = select {_BOOLS} %upper, {BYTES} %high, {BYTES} %low"""

    def decode(self, k: int) -> str:
        """One shuffle."""
        return f"  %known = call {BYTES} @llvm.x86.avx512.pshuf.b.512({BYTES} %table64, {BYTES} %c)"

    def fours(self, k: int) -> str:
        """Sums of neighbours, of which the second is multiplied by the place that it takes."""
        pairs, fours = vector("i8", [1, 1 << k] * 32), vector("i16", [1, 1 << 2 * k] * 16)
        return f"""
  %pairs = call <32 x i16> @llvm.x86.avx512.pmaddubs.w.512({BYTES} %c, {BYTES} {pairs})
  %fours = call {FOURS} @llvm.x86.avx512.pmaddw.d.512(<32 x i16> %pairs, <32 x i16> {fours})"""

    def codes(self, k: int) -> str:
        """One instruction takes eight bits from any eight places of a word."""
        places = vector("i8", [k * j for j in range(8)] * 8)
        return f"""
  %bytes = bitcast {EIGHTS} %eights to {BYTES}
  %apart = call {BYTES} @llvm.x86.avx512.pmultishift.qb.512({BYTES} {places}, {BYTES} %bytes)
  %c = and {BYTES} %apart, {same("i8", escape(k), 64)}"""

    def gather(self) -> str:
        """In a register, and the whole of it stored: to memory it is microcoded on Zen 4."""
        compress = f"@llvm.x86.avx512.mask.compress.v64i8({BYTES} %e, {BYTES} zeroinitializer, {_BOOLS} %escapes)"
        return f"  %gathered = call {BYTES} {compress}\n  store {BYTES} %gathered, ptr %to, align 1"

    def spread(self) -> str:
        """The other way round."""
        expand = f"@llvm.x86.avx512.mask.expand.v64i8({BYTES} %next, {BYTES} %known, {_BOOLS} %escapes)"
        return f"""
  %next = load {BYTES}, ptr %from, align 1
  %spread = call {BYTES} {expand}
  store {BYTES} %spread, ptr %to, align 1"""


ISAS: dict[str, type[Portable]] = {isa.name: isa for isa in (Avx512, Avx2, Portable)}


def escape(k: int) -> int:
    """The code of ``k`` bits that stands for no exponent."""
    return (1 << k) - 1


def vector(kind: str, values: Iterable[int]) -> str:
    """A constant vector."""
    return "<" + ", ".join(f"{kind} {value}" for value in values) + ">"


def same(kind: str, value: int, lanes: int) -> str:
    """A constant vector of one value."""
    return vector(kind, [value] * lanes)


def splat(name: str) -> str:
    """%{name}, 64 times the byte %{name}.byte."""
    return f"""  %{name}.one = insertelement {BYTES} poison, i8 %{name}.byte, i64 0
  %{name} = shufflevector {BYTES} %{name}.one, {BYTES} poison, <64 x i32> zeroinitializer"""


def _entry(table: str, j: int, name: str = "book") -> str:
    return f"  %{name}.at{j} = getelementptr i8, ptr {table}, i64 {j}\n  %{name}{j}.byte = load i8, ptr %{name}.at{j}"


class _Fold(NamedTuple):
    """Two neighbours come together: how far the second moves, and the bits of all of them, then and before."""

    shift: int
    together: int
    apart: int


def _folds(k: int) -> list[_Fold]:
    """From codes of ``k`` bits in a byte each to pairs, fours and eights."""
    return [_Fold(n * (8 - k), _every(16 * n, 2 * n * k), _every(8 * n, n * k)) for n in (1, 2, 4)]


def _every(period: int, bits: int) -> int:
    """A word of 64 bits with the lowest ``bits`` of each ``period`` set."""
    return sum(((1 << bits) - 1) << place for place in range(0, 64, period))


def _orders(name: str, orders: list[list[int]]) -> str:
    """A table of shuffles of eight bytes."""
    rows = ", ".join(f"<8 x i8> {vector('i8', order)}" for order in orders)
    return f"@{name} = internal constant [{len(orders)} x <8 x i8>] [{rows}], align 64"


def _move(orders: str, j: int) -> str:
    """Eight bytes at %chunk.at{j} to %sorted{j}, as byte j of %mask wants it; %ones{j} of its bits are set."""
    wide, narrow = vector("i32", [*range(8)] * 2), vector("i32", range(8))
    return f"""
  %chunk{j} = load <8 x i8>, ptr %chunk.at{j}, align 1
  %chunk.wide{j} = shufflevector <8 x i8> %chunk{j}, <8 x i8> poison, <16 x i32> {wide}
  %rest{j} = lshr i64 %mask, {8 * j}
  %byte{j} = and i64 %rest{j}, 255
  %ones{j} = call i64 @llvm.ctpop.i64(i64 %byte{j})
  %order.at{j} = getelementptr <8 x i8>, ptr @{orders}, i64 %byte{j}
  %order{j} = load <8 x i8>, ptr %order.at{j}
  %order.wide{j} = shufflevector <8 x i8> %order{j}, <8 x i8> poison, <16 x i32> {wide}
  %sorted.wide{j} = call <16 x i8> @llvm.x86.ssse3.pshuf.b.128(<16 x i8> %chunk.wide{j}, <16 x i8> %order.wide{j})
  %sorted{j} = shufflevector <16 x i8> %sorted.wide{j}, <16 x i8> poison, <8 x i32> {narrow}"""


def _each_set_bit(name: str, *, to: str, source: str) -> str:
    """A byte moves for each bit that is set in a mask: %n counts them, %bit is the bit's place."""
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
