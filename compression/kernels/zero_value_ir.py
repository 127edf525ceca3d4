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

Source: Rhu et al., Compressing DMA Engine, HPCA 2018, section 4 (zero-value compression)."""

from collections.abc import Iterable

from ..frame import BLOCK


class Portable:
    """Eight words a step, one by one without a branch: any little-endian CPU that LLVM knows.

    The other instruction sets run steps of ``lanes`` words their own way.
    """

    name = "portable"
    unroll = 1
    lanes = 8

    def __init__(self, bits: int) -> None:
        self.bits, self.vector = bits, f"<{self.lanes} x i{bits}>"

    def globals(self) -> list[str]:
        """The intrinsics that its steps call, and their tables."""
        return []

    def pack_step(self, *, masked: bool) -> str:
        """Words from %plain to %packed: those at the bits of %mask, or those not zero, which define %mask.

        Defines %next: the number of values %k and those of this step. May write 64 bytes from %packed on.
        """
        # Every word is stored, and the place moves on only if its bit is set. Volatile, or LLVM takes the
        # words out of the register that was compared, which is slower.
        word, v = f"i{self.bits}", self.vector
        test = f"""
  %x = load {v}, ptr %plain, align 1
  %set = icmp ne {v} %x, zeroinitializer
  %mask = bitcast <8 x i1> %set to i8"""
        text = ("" if masked else test) + "\n  %m = zext i8 %mask to i64\n  %n0 = add i64 0, 0"
        for j in range(8):
            text += f"""
  %plain{j} = getelementptr {word}, ptr %plain, i64 {j}
  %x{j} = load volatile {word}, ptr %plain{j}, align 1
  %packed{j} = getelementptr {word}, ptr %packed, i64 %n{j}
  store {word} %x{j}, ptr %packed{j}, align 1
  %bit{j} = lshr i64 %m, {j}
  %one{j} = and i64 %bit{j}, 1
  %n{j + 1} = add i64 %n{j}, %one{j}"""
        return text + "\n  %next = add i64 %k, %n8"

    def unpack_step(self, *, stream: bool) -> str:
        """Values from %packed by %mask to %plain; defines %next. May read a value for every lane."""
        # The next value is read for every word and cleared where there is no bit; a choice would jump.
        word = f"i{self.bits}"
        text = "  %m = zext i8 %mask to i64\n  %n0 = add i64 0, 0"
        for j in range(8):
            narrow = f"trunc i64 %one{j} to {word}" if self.bits < 64 else f"or i64 %one{j}, 0"
            text += f"""
  %bit{j} = lshr i64 %m, {j}
  %one{j} = and i64 %bit{j}, 1
  %narrow{j} = {narrow}
  %wide{j} = sub {word} 0, %narrow{j}
  %packed{j} = getelementptr {word}, ptr %packed, i64 %n{j}
  %x{j} = load {word}, ptr %packed{j}, align 1
  %y{j} = and {word} %x{j}, %wide{j}
  %plain{j} = getelementptr {word}, ptr %plain, i64 {j}
  store {word} %y{j}, ptr %plain{j}, {place(self.bits // 8, stream=stream)}
  %n{j + 1} = add i64 %n{j}, %one{j}"""
        return text + "\n  %next = add i64 %k, %n8"


class Avx512(Portable):
    """A 512-bit register a step, compressed in the register: to memory it is microcoded on Zen 4."""

    name = "avx512"
    unroll = 4

    def __init__(self, bits: int) -> None:
        self.lanes = 512 // bits
        super().__init__(bits)
        self.bools, self.shape = f"<{self.lanes} x i1>", f"v{self.lanes}i{bits}"

    def globals(self) -> list[str]:
        v, b, name = self.vector, self.bools, "@llvm.x86.avx512.mask"
        return [f"declare {v} {name}.{verb}.{self.shape}({v}, {v}, {b})" for verb in ("compress", "expand")]

    def pack_step(self, *, masked: bool) -> str:
        """The full register is stored, hence the slack behind the values."""
        v, b, m = self.vector, self.bools, f"i{self.lanes}"
        test = f"%set = icmp ne {v} %x, zeroinitializer\n  %mask = bitcast {b} %set to {m}"
        return f"""
  %x = load {v}, ptr %plain, align 1
  {f"%set = bitcast {m} %mask to {b}" if masked else test}
  %y = call {v} @llvm.x86.avx512.mask.compress.{self.shape}({v} %x, {v} zeroinitializer, {b} %set)
  store {v} %y, ptr %packed, align 1
{count("mask", self.lanes, "ones")}
  %next = add i64 %k, %ones"""

    def unpack_step(self, *, stream: bool) -> str:
        v, b, m = self.vector, self.bools, f"i{self.lanes}"
        return f"""
  %set = bitcast {m} %mask to {b}
  %x = load {v}, ptr %packed, align 1
  %y = call {v} @llvm.x86.avx512.mask.expand.{self.shape}({v} %x, {v} zeroinitializer, {b} %set)
  store {v} %y, ptr %plain, {place(64, stream=stream)}
{count("mask", self.lanes, "ones")}
  %next = add i64 %k, %ones"""


def count(mask: str, lanes: int, ones: str) -> str:
    """%{ones} = the bits set in %{mask}, as i64."""
    widen = f"or i64 %{mask}, 0" if lanes == 64 else f"zext i{lanes} %{mask} to i64"
    return f"  %{ones}.wide = {widen}\n  %{ones} = call i64 @llvm.ctpop.i64(i64 %{ones}.wide)"


def place(num_bytes: int, *, stream: bool) -> str:
    """Alignment of a store of ``num_bytes``: past the cache to a multiple of them, or anywhere."""
    return f"align {num_bytes}, !nontemporal !0" if stream else "align 1"


_NONE = 128  # as an index of a byte: a zero
_COUNTED = count("mask", 8, "ones") + "\n  %next = add i64 %k, %ones"
# The masks of words 0 to 3 and 4 to 7, and where the values of the latter begin.
_HALVES = f"""  %low.mask = and i8 %mask, 15
  %high.mask = lshr i8 %mask, 4
{count("low.mask", 8, "low.ones")}
  %packed.high = getelementptr i64, ptr %packed, i64 %low.ones
{_COUNTED}"""


class Avx2(Portable):
    """Words of 8 and 16 bits move by vpshufb, those of 32 and 64 by vpermd, the latter four at a time."""

    name = "avx2"
    unroll = 2

    def __init__(self, bits: int) -> None:
        super().__init__(bits)
        # A row of a table: so many lanes, and the indices of each: of its bytes, or of its 32-bit words.
        self.row_lanes, self.per_lane = {8: (8, 1), 16: (8, 2), 32: (8, 1), 64: (4, 2)}[bits]
        self.row = self.row_lanes * self.per_lane  # bytes

    def globals(self) -> list[str]:
        lanes = range(self.row_lanes)
        kept = [[lane for lane in lanes if mask >> lane & 1] for mask in range(1 << self.row_lanes)]
        tables = {
            "compress": [row + [None] * (self.row_lanes - len(row)) for row in kept],
            "expand": [[row.index(lane) if lane in row else None for lane in lanes] for row in kept],
        }
        texts = [_table(f"{name}{self.bits}", map(self._indices, rows)) for name, rows in tables.items()]
        if self.bits < 32:
            return [*texts, "declare <16 x i8> @llvm.x86.ssse3.pshuf.b.128(<16 x i8>, <16 x i8>)"]
        return [*texts, "declare <8 x i32> @llvm.x86.avx2.permd(<8 x i32>, <8 x i32>)"]

    def _indices(self, lanes: Iterable[int | None]) -> list[int]:
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
  %{half}q = shufflevector {v} %x, {v} poison, <4 x i32> {vector("i32", lanes)}
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
        twice = vector("i32", [*range(8), *range(8)])
        return f"""{text}  %bytes = shufflevector {row} %x, {row} poison, <16 x i32> {twice}
  %orders = shufflevector {row} %order, {row} poison, <16 x i32> {twice}
  %moved = {call}(<16 x i8> %bytes, <16 x i8> %orders)
  %y = shufflevector <16 x i8> %moved, <16 x i8> poison, <8 x i32> {vector("i32", range(8))}"""


def vector(kind: str, numbers: Iterable[int]) -> str:
    """A constant of so many elements."""
    return "<" + ", ".join(f"{kind} {number}" for number in numbers) + ">"


def _table(name: str, rows: Iterable[list[int]]) -> str:
    text = "".join(f"\\{byte:02x}" for row in rows for byte in row)
    return f'@{name} = private unnamed_addr constant [{len(text) // 3} x i8] c"{text}", align 64'


BITMAP = BLOCK // 8  # bytes of a block's bitmap
_AHEAD = 2048  # bytes to prefetch ahead: the hardware does not follow the value stream


def copy(target: str, source: str, num_bytes: str) -> str:
    return f"call void @llvm.memcpy.p0.p0.i64(ptr %{target}, ptr %{source}, i64 %{num_bytes}, i1 false)"


def clear(target: str, num_bytes: int) -> str:
    return f"call void @llvm.memset.p0.i64(ptr %{target}, i8 0, i64 {num_bytes}, i1 false)"


# Block %b begins: %left words are still to do, %whole says whether they fill it.
BEGIN_BLOCK = f"""
  %b = phi i64 [0, %entry], [%b.next, %right]
  %word = mul i64 %b, {BLOCK}
  %left = sub i64 %words, %word
  %whole = icmp uge i64 %left, {BLOCK}
  %bitmap.block = getelementptr [{BITMAP} x i8], ptr %bitmap, i64 %b"""

# The bitmap of a partial block, padded with zeros in %bitmap.room; %clean: no bit is set beyond the words.
LAST_BITMAP = f"""
  %left.up = add i64 %left, 7
  %left.bytes = lshr i64 %left.up, 3
  {clear("bitmap.room", BITMAP)}
  {copy("bitmap.room", "bitmap.block", "left.bytes")}
  %edge = lshr i64 %left, 3
  %edge.at = getelementptr i8, ptr %bitmap.room, i64 %edge
  %edge.byte = load i8, ptr %edge.at, align 1
  %left.low = trunc i64 %left to i8
  %edge.used = and i8 %left.low, 7
  %beyond = lshr i8 %edge.byte, %edge.used
  %clean = icmp eq i8 %beyond, 0"""

NEXT_BLOCK = f"""right:
  %b.next = add i64 %b, 1
  %more = icmp ugt i64 %left, {BLOCK}
  br i1 %more, label %block, label %done"""


def steps(isa: Portable, body: str, *, start: str, values: str, ahead: str) -> str:
    """The steps of a block, entered from %run and left to %ended with %next values."""
    return f"""step:
  %i = phi i64 [0, %run], [%i.next, %step]
  %k = phi i64 [{start}, %run], [%next, %step]
  %mask.at = getelementptr i{isa.lanes}, ptr %bitmap.at, i64 %i
  %plain = getelementptr [{isa.lanes} x i{isa.bits}], ptr %plain.at, i64 %i
  %packed = getelementptr i{isa.bits}, ptr {values}, i64 %k
  %ahead = getelementptr i8, ptr {ahead}, i64 {_AHEAD}
  call void @llvm.prefetch.p0(ptr %ahead, i32 0, i32 3, i32 1)
{body}
  %i.next = add i64 %i, 1
  %full = icmp eq i64 %i.next, {BLOCK // isa.lanes}
  br i1 %full, label %ended, label %step, !llvm.loop !1"""


_SHARED = [
    "declare i64 @llvm.ctpop.i64(i64)",
    "declare i64 @llvm.umax.i64(i64, i64)",
    "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
    "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)",
    "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
]


def _pack(isa: Portable, *, masked: bool) -> str:
    bits, mask = isa.bits, f"i{isa.lanes}"
    if masked:
        head = f"@packm{bits}(ptr noalias %source, i64 %words, ptr noalias %bitmap"
        body = f"  %mask = load {mask}, ptr %mask.at, align 1\n{isa.pack_step(masked=True)}"
        partial, sound, ended = LAST_BITMAP, "i1 %clean", "  br label %right"
    else:
        head = f"@pack{bits}(ptr noalias %source, i64 %words, ptr noalias %bitmap, ptr noalias %offsets"
        body = f"{isa.pack_step(masked=False)}\n  store {mask} %mask, ptr %mask.at, align 1"
        partial, sound = f"\n  {clear('room', BLOCK * bits // 8)}", "i1 true"
        ended = f"""  %offset = getelementptr i64, ptr %offsets, i64 %b
  store i64 %next, ptr %offset, align 1
  br i1 %whole, label %right, label %last
last:
  %left.up = add i64 %left, 511
  %left.lines = lshr i64 %left.up, 9
  %left.bytes = shl i64 %left.lines, 6
  {copy("bitmap.block", "bitmap.room", "left.bytes")}
  br label %right"""
    return f"""
define i64 {head}, ptr noalias %values, i64 %start) {{
entry:
  %room = alloca [{BLOCK} x i{bits}], align 64
  %bitmap.room = alloca [{BITMAP} x i8], align 64
  br label %block
block:
  %k.block = phi i64 [%start, %entry], [%next, %right]{BEGIN_BLOCK}
  %source.block = getelementptr i{bits}, ptr %source, i64 %word
  br i1 %whole, label %run, label %partial
partial:{partial}
  %num.bytes = mul i64 %left, {bits // 8}
  {copy("room", "source.block", "num.bytes")}
  br {sound}, label %run, label %done
run:
  %plain.at = phi ptr [%source.block, %block], [%room, %partial]
  %bitmap.at = phi ptr [%bitmap.block, %block], [%bitmap.room, %partial]
  br label %step
{steps(isa, body, start="%k.block", values="%values", ahead="%plain")}
ended:
{ended}
{NEXT_BLOCK}
done:
  %result = phi i64 [%next, %right], [-1, %partial]
  ret i64 %result
}}"""


def _unpack(isa: Portable, *, stream: bool) -> str:
    """A block reads in place if 4,096 values more would still be there, else from a copy of its own values.

    So a step may load whole vectors, whatever bitmap and offsets say.
    """
    name, bits, lanes = "stream" if stream else "unpack", isa.bits, isa.lanes
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
  br i1 %clean, label %check, label %done
check:
  %bitmap.at = phi ptr [%bitmap.block, %block], [%bitmap.room, %partial]
  %plain.at = phi ptr [%out.block, %block], [%out.room, %partial]
  %offset = getelementptr i64, ptr %offsets, i64 %b
  %k.end = load i64, ptr %offset, align 1
  %num = sub i64 %k.end, %k.block
  %ascends = icmp ule i64 %num, {BLOCK}
  %ends = icmp ule i64 %k.end, %count
  %sound = and i1 %ascends, %ends
  br i1 %sound, label %choose, label %done
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
  br i1 %agrees, label %hand, label %done
hand:
  br i1 %whole, label %right, label %last
last:
  %out.bytes = mul i64 %left, {bits // 8}
  {copy("out.block", "out.room", "out.bytes")}
  br label %right
{NEXT_BLOCK}
done:
  %result = phi i64 [%k.end, %right], [-1, %partial], [-1, %check], [-1, %ended]
  {"fence seq_cst" if stream else ""}
  ret i64 %result
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


STEPS: dict[str, type[Portable]] = {kind.name: kind for kind in (Avx512, Avx2, Portable)}


def module(name: str) -> str:
    """Return the text of all kernels of an instruction set."""
    loops, shared = [_CHECKSUM], list(_SHARED)
    for isa in map(STEPS[name], (8, 16, 32, 64)):
        shared += isa.globals()
        loops += [_pack(isa, masked=False), _pack(isa, masked=True)]
        loops += [_unpack(isa, stream=False), _unpack(isa, stream=True)]
    unrolled = f'!1 = distinct !{{!1, !2}}\n!2 = !{{!"llvm.loop.unroll.count", i32 {STEPS[name].unroll}}}'
    return "\n".join([*dict.fromkeys(shared), *loops, "!0 = !{i32 1}", unrolled])
