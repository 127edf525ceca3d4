"""A step of eight words by AVX2, as textual LLVM IR.

AVX2 cannot compress a register, but it can permute one: a table has the permutation of every mask. ``pext``
would need no table, but is microcoded before Zen 3.
"""

from __future__ import annotations

from collections.abc import Iterable

from .isa import count, place

_NONE = 128  # as an index of a byte: a zero
_COUNTED = count("mask", 8, "ones") + "\n  %next = add i64 %k, %ones"
# The masks of words 0 to 3 and 4 to 7, and where the values of the latter begin.
_HALVES = f"""  %low.mask = and i8 %mask, 15
  %high.mask = lshr i8 %mask, 4
{count("low.mask", 8, "low.ones")}
  %packed.high = getelementptr i64, ptr %packed, i64 %low.ones
{_COUNTED}"""


class Avx2:
    """Words of 8 and 16 bits move by vpshufb, those of 32 and 64 by vpermd, the latter four at a time."""

    name = "avx2"
    streams = True
    unroll = 2
    lanes = 8

    def __init__(self, bits: int) -> None:
        self.bits, self.vector = bits, f"<8 x i{bits}>"
        # A row of a table: so many lanes, and the indices of each: of its bytes, or of its 32-bit words.
        self.row_lanes, self.per_lane = {8: (8, 1), 16: (8, 2), 32: (8, 1), 64: (4, 2)}[bits]
        self.row = self.row_lanes * self.per_lane  # bytes

    def globals(self) -> list[str]:
        """The permutations, and how to permute."""
        masks = range(1 << self.row_lanes)
        tables = [
            _table(f"compress{self.bits}", [self._indices(self._compressed(mask)) for mask in masks]),
            _table(f"expand{self.bits}", [self._indices(self._expanded(mask)) for mask in masks]),
        ]
        if self.bits < 32:
            return [*tables, "declare <16 x i8> @llvm.x86.ssse3.pshuf.b.128(<16 x i8>, <16 x i8>)"]
        return [*tables, "declare <8 x i32> @llvm.x86.avx2.permd(<8 x i32>, <8 x i32>)"]

    def _compressed(self, mask: int) -> list[int | None]:
        """Which lane goes to each place."""
        kept: list[int | None] = [lane for lane in range(self.row_lanes) if mask >> lane & 1]
        return kept + [None] * (self.row_lanes - len(kept))

    def _expanded(self, mask: int) -> list[int | None]:
        """Which value goes to each lane."""
        below = [(mask & ((1 << lane) - 1)).bit_count() for lane in range(self.row_lanes)]
        return [below[lane] if mask >> lane & 1 else None for lane in range(self.row_lanes)]

    def _indices(self, lanes: list[int | None]) -> list[int]:
        per = self.per_lane
        return [_NONE if lane is None else lane * per + i for lane in lanes for i in range(per)]

    def pack_step(self, *, masked: bool) -> str:
        """Whole registers are stored, hence the slack behind the values."""
        v = self.vector
        test = f"  %set = icmp ne {v} %x, zeroinitializer\n  %mask = bitcast <8 x i1> %set to i8"
        text = f"  %x = load {v}, ptr %plain, align 1\n{'' if masked else test}\n"
        if self.bits < 64:
            text += f"{self._permute('', 'compress')}\n  store {v} %y, ptr %packed, align 1\n"
            return text + _COUNTED
        text += _HALVES
        for half, target in (("low.", "%packed"), ("high.", "%packed.high")):
            lanes = range(4) if half == "low." else range(4, 8)
            text += f"""
  %{half}q = shufflevector {v} %x, {v} poison, <4 x i32> {_vector("i32", lanes)}
  %{half}x = bitcast <4 x i64> %{half}q to <8 x i32>
{self._permute(half, "compress")}
  store <8 x i32> %{half}y, ptr {target}, align 1"""
        return text

    def unpack_step(self, *, stream: bool) -> str:
        """Eight values are loaded and spread; a permutation of 32-bit words leaves it to us to clear."""
        v, bits = self.vector, self.bits
        if bits == 64:
            return self._unpack_halves(stream=stream)
        text = f"  %x = load {v}, ptr %packed, align 1\n{self._permute('', 'expand')}\n"
        value, kind = "%y", v
        if bits == 32:
            text += "  %set = bitcast i8 %mask to <8 x i1>\n"
            text += f"  %z = select <8 x i1> %set, {v} %y, {v} zeroinitializer\n"
            value = "%z"
        if bits == 8:  # the one store past the cache that is as short
            text += f"  %z = bitcast {v} %y to i64\n"
            value, kind = "%z", "i64"
        text += f"  store {kind} {value}, ptr %plain, {place(bits, stream=stream)}\n"
        return text + _COUNTED

    def _unpack_halves(self, *, stream: bool) -> str:
        text = _HALVES + "\n  %plain.high = getelementptr i8, ptr %plain, i64 32"
        for half, source, target in (("low.", "%packed", "%plain"), ("high.", "%packed.high", "%plain.high")):
            text += f"""
  %{half}x = load <8 x i32>, ptr {source}, align 1
{self._permute(half, "expand")}
  %{half}q = bitcast <8 x i32> %{half}y to <4 x i64>
  %{half}nibble = trunc i8 %{half}mask to i4
  %{half}set = bitcast i4 %{half}nibble to <4 x i1>
  %{half}z = select <4 x i1> %{half}set, <4 x i64> %{half}q, <4 x i64> zeroinitializer
  store <4 x i64> %{half}z, ptr {target}, {place(32, stream=stream)}"""
        return text

    def _permute(self, t: str, table: str) -> str:
        """%{t}y = %{t}x in the order that ``table`` has for %{t}mask."""
        row, bits = f"<{self.row} x i8>", self.bits
        text = f"""  %{t}index = zext i8 %{t}mask to i64
  %{t}row = getelementptr {row}, ptr @{table}{bits}, i64 %{t}index
  %{t}order = load {row}, ptr %{t}row, align {self.row}
"""
        if bits >= 32:
            return f"""{text}  %{t}wide = zext {row} %{t}order to <8 x i32>
  %{t}y = call <8 x i32> @llvm.x86.avx2.permd(<8 x i32> %{t}x, <8 x i32> %{t}wide)"""
        call = "call <16 x i8> @llvm.x86.ssse3.pshuf.b.128"
        if bits == 16:
            return f"""{text}  %bytes = bitcast {self.vector} %x to <16 x i8>
  %moved = {call}(<16 x i8> %bytes, <16 x i8> %order)
  %y = bitcast <16 x i8> %moved to {self.vector}"""
        twice = _vector("i32", [*range(8), *range(8)])
        return f"""{text}  %bytes = shufflevector {row} %x, {row} poison, <16 x i32> {twice}
  %orders = shufflevector {row} %order, {row} poison, <16 x i32> {twice}
  %moved = {call}(<16 x i8> %bytes, <16 x i8> %orders)
  %y = shufflevector <16 x i8> %moved, <16 x i8> poison, <8 x i32> {_vector("i32", range(8))}"""


def _vector(kind: str, numbers: Iterable[int]) -> str:
    return "<" + ", ".join(f"{kind} {number}" for number in numbers) + ">"


def _table(name: str, rows: Iterable[list[int]]) -> str:
    text = "".join(f"\\{byte:02x}" for row in rows for byte in row)
    return f'@{name} = private unnamed_addr constant [{len(text) // 3} x i8] c"{text}", align 64'
