"""The steps of the exponent kernels where AVX2 or AVX-512 have instructions for them, as textual LLVM IR."""

from .exponent_ir import (
    BOOLS,
    BYTES,
    EIGHTS,
    FOURS,
    GROUP,
    NUM_LEVELS,
    TABLE_BYTES,
    PortableExponents,
    escape,
    same,
)
from .zero_value_ir import vector

_BOOK = 256
_ZERO = 128  # in the order of a shuffle


class Avx2Exponents(PortableExponents):
    """To decode is to shuffle a table, and so is moving the escapes among eight bytes."""

    name = "avx2"

    def shared(self) -> str:
        """Shuffles, and their orders for every mask of eight bits."""
        places = [[j for j in range(8) if mask >> j & 1] for mask in range(256)]
        gathers = [row + [_ZERO] * (8 - len(row)) for row in places]
        spreads = [[row.index(j) if j in row else _ZERO for j in range(8)] for row in places]
        return f"""
declare <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8>, <32 x i8>)
declare <16 x i8> @llvm.x86.ssse3.pshuf.b.128(<16 x i8>, <16 x i8>)
{_orders("gathers", gathers)}
{_orders("spreads", spreads)}"""

    def decoder(self, k: int) -> str:
        """The table twice: the shuffle sees 16 bytes at a time."""
        return _repeated_table(2)

    def decode(self, k: int) -> str:
        """Half by half; a shuffle by an escape finds what follows the table, so that is cleared."""
        text = ""
        for half in (0, 1):
            places = vector("i32", range(32 * half, 32 * half + 32))
            text += f"""
  %c{half} = shufflevector {BYTES} %c, {BYTES} poison, <32 x i32> {places}
  %e{half} = call <32 x i8> @llvm.x86.avx2.pshuf.b(<32 x i8> %repeated, <32 x i8> %c{half})"""
        places = vector("i32", range(GROUP))
        return f"""{text}
  %halves.joined = shufflevector <32 x i8> %e0, <32 x i8> %e1, <64 x i32> {places}
  %known = select {BOOLS} %escapes, {BYTES} zeroinitializer, {BYTES} %halves.joined"""

    def gather(self) -> str:
        """Eight bytes a turn, over none that is still needed."""
        text = "  %at0 = getelementptr i8, ptr %to, i64 0"
        for j in range(8):
            text += f"""
  %eight.from{j} = getelementptr i8, ptr %from, i64 {8 * j}
{_move("gathers", j)}
  store <8 x i8> %moved{j}, ptr %at{j}, align 1
  %at{j + 1} = getelementptr i8, ptr %at{j}, i64 %ones{j}"""
        return text

    def spread(self) -> str:
        """The other way round, into the zeros of %known."""
        text = "  %eight.from0 = getelementptr i8, ptr %from, i64 0"
        for j in range(8):
            places = vector("i32", range(8 * j, 8 * j + 8))
            text += f"""
{_move("spreads", j)}
  %eight.from{j + 1} = getelementptr i8, ptr %eight.from{j}, i64 %ones{j}
  %known{j} = shufflevector {BYTES} %known, {BYTES} poison, <8 x i32> {places}
  %full{j} = or <8 x i8> %moved{j}, %known{j}
  %eight.to{j} = getelementptr i8, ptr %to, i64 {8 * j}
  store <8 x i8> %full{j}, ptr %eight.to{j}"""
        return text


class Avx512Exponents(PortableExponents):
    """A table of 256 bytes is two shuffles, and escapes are compressed in a register."""

    name = "avx512"
    book_bytes = _BOOK

    def shared(self) -> str:
        name = "@llvm.x86.avx512"
        return f"""
declare {BYTES} {name}.vpermi2var.qi.512({BYTES}, {BYTES}, {BYTES})
declare {BYTES} {name}.pshuf.b.512({BYTES}, {BYTES})
declare <32 x i16> {name}.pmaddubs.w.512({BYTES}, {BYTES})
declare {FOURS} {name}.pmaddw.d.512(<32 x i16>, <32 x i16>)
declare {BYTES} {name}.pmultishift.qb.512({BYTES}, {BYTES})
declare {BYTES} {name}.mask.compress.v64i8({BYTES}, {BYTES}, {BOOLS})
declare {BYTES} {name}.mask.expand.v64i8({BYTES}, {BYTES}, {BOOLS})"""

    def books(self, plan: tuple[int, ...]) -> str:
        """256 bytes a level, exponent to code."""
        text = f"  %books = alloca [{NUM_LEVELS * _BOOK} x i8], align 64"
        for place in range(0, NUM_LEVELS * _BOOK, GROUP):
            text += f"""
  %books{place} = getelementptr i8, ptr %books, i64 {place}
  store {BYTES} {same("i8", escape(plan[place // _BOOK]), GROUP)}, ptr %books{place}"""
        for level, j in ((level, j) for level, k in enumerate(plan) for j in range(escape(k))):
            name = f"{level}.{j}"
            text += f"""
  %entry.at{name} = getelementptr i8, ptr %tables, i64 {TABLE_BYTES * level + j}
  %entry{name} = load i8, ptr %entry.at{name}
  %entry.wide{name} = zext i8 %entry{name} to i64
  %code.at{name} = getelementptr i8, ptr %books{_BOOK * level}, i64 %entry.wide{name}
  store i8 {j}, ptr %code.at{name}"""
        return text

    def encoder(self, k: int) -> str:
        text = ""
        for j in range(4):
            text += f"""
  %book.at{j} = getelementptr {BYTES}, ptr %book, i64 {j}
  %book{j} = load {BYTES}, ptr %book.at{j}"""
        return text

    def encode(self, k: int) -> str:
        """One shuffle per half of the book; the exponent's highest bit chooses between them."""
        shuffle = f"call {BYTES} @llvm.x86.avx512.vpermi2var.qi.512"
        return f"""
  %lower = {shuffle}({BYTES} %book0, {BYTES} %e, {BYTES} %book1)
  %upper = {shuffle}({BYTES} %book2, {BYTES} %e, {BYTES} %book3)
  %is.upper = icmp slt {BYTES} %e, zeroinitializer
  %c = select {BOOLS} %is.upper, {BYTES} %upper, {BYTES} %lower"""

    def fours(self, k: int) -> str:
        """Sums of neighbours, the second multiplied up to the place that it takes."""
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
  %c = and {BYTES} %apart, {same("i8", escape(k), GROUP)}"""

    def decoder(self, k: int) -> str:
        """The table four times: the shuffle sees 16 bytes at a time."""
        return _repeated_table(4)

    def decode(self, k: int) -> str:
        """One shuffle; what it finds for escapes is replaced by ``spread``."""
        return f"  %known = call {BYTES} @llvm.x86.avx512.pshuf.b.512({BYTES} %repeated, {BYTES} %c)"

    def gather(self) -> str:
        """In a register, and the whole of it stored: to memory it is microcoded on Zen 4."""
        zeros, name = f"{BYTES} zeroinitializer", "@llvm.x86.avx512.mask.compress.v64i8"
        return f"""
  %gathered = call {BYTES} {name}({BYTES} %e, {zeros}, {BOOLS} %escapes)
  store {BYTES} %gathered, ptr %to, align 1"""

    def spread(self) -> str:
        name = "@llvm.x86.avx512.mask.expand.v64i8"
        return f"""
  %next = load {BYTES}, ptr %from, align 1
  %full = call {BYTES} {name}({BYTES} %next, {BYTES} %known, {BOOLS} %escapes)
  store {BYTES} %full, ptr %to"""


def _repeated_table(times: int) -> str:
    """%repeated, the 16 bytes of %table a few times."""
    places = vector("i32", [*range(16)] * times)
    return f"""
  %entries = load <16 x i8>, ptr %table, align 1
  %repeated = shufflevector <16 x i8> %entries, <16 x i8> poison, <{16 * times} x i32> {places}"""


def _orders(name: str, orders: list[list[int]]) -> str:
    """A table of shuffles of eight bytes."""
    rows = ", ".join(f"<8 x i8> {vector('i8', order)}" for order in orders)
    return f"@{name} = internal constant [{len(orders)} x <8 x i8>] [{rows}], align 64"


def _move(orders: str, j: int) -> str:
    """Eight bytes at %eight.from{j} to %moved{j}, by byte j of %mask, of which %ones{j} bits are set."""
    wide, narrow, pair = vector("i32", [*range(8)] * 2), vector("i32", range(8)), "<16 x i8>"
    operands = f"{pair} %eight.wide{j}, {pair} %order.wide{j}"
    return f"""
  %eight{j} = load <8 x i8>, ptr %eight.from{j}, align 1
  %eight.wide{j} = shufflevector <8 x i8> %eight{j}, <8 x i8> poison, <16 x i32> {wide}
  %rest{j} = lshr i64 %mask, {8 * j}
  %byte{j} = and i64 %rest{j}, 255
  %ones{j} = call i64 @llvm.ctpop.i64(i64 %byte{j})
  %order.at{j} = getelementptr <8 x i8>, ptr @{orders}, i64 %byte{j}
  %order{j} = load <8 x i8>, ptr %order.at{j}
  %order.wide{j} = shufflevector <8 x i8> %order{j}, <8 x i8> poison, <16 x i32> {wide}
  %moved.wide{j} = call {pair} @llvm.x86.ssse3.pshuf.b.128({operands})
  %moved{j} = shufflevector {pair} %moved.wide{j}, {pair} poison, <8 x i32> {narrow}"""


STEPS: dict[str, type[PortableExponents]] = {
    kind.name: kind for kind in (Avx512Exponents, Avx2Exponents, PortableExponents)
}
