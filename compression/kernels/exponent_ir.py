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
Nothing outside the sections is read or written, whatever they hold."""

from itertools import product

from ..frame import BLOCK
from .zero_value_ir import vector

GROUP = 64  # exponents per step
# Bits of a code of each level; they are tried in this order.
PLANS = ((1, 2, 2), (2, 2, 2), (3, 3, 3), (4, 4, 4))
NUM_LEVELS = 3
TABLE_BYTES = 16  # of one level: code to exponent
BYTES, FOURS, EIGHTS, BOOLS = "<64 x i8>", "<16 x i32>", "<8 x i64>", "<64 x i1>"


class PortableExponents:
    """A table is a few comparisons, and escapes move one by one; any little-endian CPU."""

    name = "portable"
    book_bytes = TABLE_BYTES  # of one level

    def shared(self) -> str:
        """Functions and tables of its steps."""
        gather = _each_set_bit("gather", source="%bit", to="%n")
        return gather + _each_set_bit("spread", source="%n", to="%bit")

    def books(self, plan: tuple[int, ...]) -> str:
        """%books, from which ``encoder`` reads: here they are %tables, 16 bytes a level, code to exponent."""
        return "  %books = getelementptr i8, ptr %tables, i64 0"

    def encoder(self, k: int) -> str:
        """Registers of ``encode`` from the level's %book, before the loop."""
        return _splats("%book", k)

    def encode(self, k: int) -> str:
        """Exponents %e to codes %c: the bits of an escape, without those that the exponent's code lacks."""
        lacking = [same("i8", escape(k) ^ j, GROUP) for j in range(escape(k))]
        wanted = [f"%splat{j}" for j in range(escape(k))]
        return f"""{_select("%e", wanted, lacking, "%lacking")}
  %c = xor {BYTES} %lacking, {same("i8", escape(k), GROUP)}"""

    def fours(self, k: int) -> str:
        """Codes %c to %fours, words of four codes and zeros."""
        text, codes = f"  %c.words = bitcast {BYTES} %c to {FOURS}", "%c.words"
        for n, result in ((1, "%pairs"), (2, "%fours")):
            text += f"""
  %shifted{n} = lshr {FOURS} {codes}, {same("i32", n * (8 - k), 16)}
  %folded{n} = or {FOURS} %shifted{n}, {codes}
  {result} = and {FOURS} %folded{n}, {same("i32", _every(16 * n, 2 * n * k) & 0xFFFFFFFF, 16)}"""
            codes = result
        return text

    def codes(self, k: int) -> str:
        """%eights, words of eight codes and zeros, to codes %c."""
        text, codes = "", "%eights"
        for n in (4, 2, 1):
            text += f"""
  %shifted{n} = shl {EIGHTS} {codes}, {same("i64", n * (8 - k), 8)}
  %folded{n} = or {EIGHTS} %shifted{n}, {codes}
  %apart{n} = and {EIGHTS} %folded{n}, {same("i64", _every(8 * n, n * k), 8)}"""
            codes = f"%apart{n}"
        return f"{text}\n  %c = bitcast {EIGHTS} {codes} to {BYTES}"

    def decoder(self, k: int) -> str:
        """Registers of ``decode`` from the level's %table, before the loop."""
        return _splats("%table", k)

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


def kernel_name(verb: str, bits: int, plan: tuple[int, ...], *, stream: bool) -> str:
    return f"{verb}{'s' if stream else ''}{bits}_{plan_name(plan)}"


def plan_name(plan: tuple[int, ...]) -> str:
    return "".join(map(str, plan))


def escape(k: int) -> int:
    """The code of ``k`` bits that stands for no exponent."""
    return (1 << k) - 1


def same(kind: str, value: int, lanes: int) -> str:
    return vector(kind, [value] * lanes)


def _splats(table: str, k: int) -> str:
    return "".join(
        f"""
  %entry.at{j} = getelementptr i8, ptr {table}, i64 {j}
  %entry{j} = load i8, ptr %entry.at{j}
  %one{j} = insertelement {BYTES} poison, i8 %entry{j}, i64 0
  %splat{j} = shufflevector {BYTES} %one{j}, {BYTES} poison, <64 x i32> zeroinitializer"""
        for j in range(escape(k))
    )


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


_AHEAD = 2048  # bytes to prefetch ahead
GOLDEN = 0x9E3779B97F4A7C15  # of 2^64: its multiples fall evenly, and with no pattern of a tensor
_HALVES = f"<{GROUP} x i16>"


def _pair(kind: str, first: str, second: str, out: str) -> str:
    """Two vectors of 64 to one of 128, in turns."""
    places = vector("i32", [lane + GROUP * side for lane in range(GROUP) for side in (0, 1)])
    return f"  %{out} = shufflevector {kind} %{first}, {kind} %{second}, <{2 * GROUP} x i32> {places}"


def _unpair(kind: str, pairs: str, first: str, second: str) -> str:
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


_LEVEL_AHEAD = 128  # bytes to prefetch per step: memory would else rest while the levels work in the cache


def _level(head: str, ready: str, step: str) -> str:
    """A loop over the groups %i of %num exponents, of which each has %ones escapes; returns all of those."""
    return f"""
define internal i64 {head} noinline {{
entry:
  %none = icmp eq i64 %num, 0
  br i1 %none, label %done, label %ready
ready:
{ready}
  br label %step
step:
  %i = phi i64 [0, %ready], [%i.next, %step]
  %n = phi i64 [0, %ready], [%n.next, %step]
{prefetch("%ahead", _LEVEL_AHEAD)}
{step}
  %n.next = add i64 %n, %ones
  %i.next = add i64 %i, 1
  %groups = call i64 @groups(i64 %num)
  %all = icmp eq i64 %i.next, %groups
  br i1 %all, label %done, label %step, !llvm.loop !1
done:
  %found = phi i64 [0, %entry], [%n.next, %step]
  ret i64 %found
}}"""


def shorten(isa: PortableExponents, k: int) -> str:
    """One level: ``num`` exponents to codes, padded to a multiple of 64 with the table's first exponent.

    The escapes come to the front of the exponents and are counted.
    """
    return _level(
        f"@shorten{k}(ptr %exponents, i64 %num, ptr noalias %codes, ptr %table, ptr %book, ptr %ahead)",
        f"""
  %common = load i8, ptr %table
  %end = getelementptr i8, ptr %exponents, i64 %num
  call void @llvm.memset.p0.i64(ptr %end, i8 %common, i64 {GROUP}, i1 false)
{isa.encoder(k)}""",
        f"""
  %from = getelementptr {BYTES}, ptr %exponents, i64 %i
  %e = load {BYTES}, ptr %from, align 64
{isa.encode(k)}
{isa.fours(k)}
  %codes.to = getelementptr [{8 * k} x i8], ptr %codes, i64 %i
{_store_codes(k)}
{_escapes(k)}
  %to = getelementptr i8, ptr %exponents, i64 %n
{isa.gather()}""",
    )


def restore(isa: PortableExponents, k: int) -> str:
    """Undo ``shorten`` and return the escapes; of more than ``num_escapes`` the bytes mean nothing."""
    return _level(
        f"@restore{k}(ptr noalias %codes, ptr noalias %source, i64 %num_escapes, i64 %num, "
        "ptr noalias %table, ptr noalias %exponents, ptr %ahead)",
        isa.decoder(k),
        f"""
  %codes.from = getelementptr [{8 * k} x i8], ptr %codes, i64 %i
{_load_codes(k)}
{isa.codes(k)}
{_escapes(k)}
{isa.decode(k)}
  %place = call i64 @llvm.umin.i64(i64 %n, i64 %num_escapes)
  %from = getelementptr i8, ptr %source, i64 %place
  %to = getelementptr {BYTES}, ptr %exponents, i64 %i
{isa.spread()}""",
    )


def _escapes(k: int) -> str:
    return f"""
  %escapes = icmp eq {BYTES} %c, {same("i8", escape(k), GROUP)}
  %mask = bitcast <{GROUP} x i1> %escapes to i64
  %ones = call i64 @llvm.ctpop.i64(i64 %mask)"""


def _store_codes(k: int) -> str:
    """The lowest 4 k bits of the words %fours, one after another."""
    if k % 2 == 0:
        return f"""
  %dense = trunc {FOURS} %fours to <16 x i{4 * k}>
  store <16 x i{4 * k}> %dense, ptr %codes.to, align 1"""
    places = vector("i32", [8 * word + byte for word in range(8) for byte in range(k)])
    return f"""
  %halves = bitcast {FOURS} %fours to {EIGHTS}
  %second = lshr {EIGHTS} %halves, {same("i64", 32 - 4 * k, 8)}
  %eights = or {EIGHTS} %halves, %second
  %eights.bytes = bitcast {EIGHTS} %eights to {BYTES}
  %dense = shufflevector {BYTES} %eights.bytes, {BYTES} poison, <{8 * k} x i32> {places}
  store <{8 * k} x i8> %dense, ptr %codes.to, align 1"""


def _load_codes(k: int) -> str:
    """8 k bits each to the words %eights."""
    if k != 3:
        return f"""
  %dense = load <8 x i{8 * k}>, ptr %codes.from, align 1
  %eights = zext <8 x i{8 * k}> %dense to {EIGHTS}"""
    places = vector("i32", [3 * word + byte if byte < 3 else 24 for word in range(8) for byte in range(8)])
    return f"""
  %dense = load <24 x i8>, ptr %codes.from, align 1
  %eights.bytes = shufflevector <24 x i8> %dense, <24 x i8> zeroinitializer, <64 x i32> {places}
  %eights = bitcast {BYTES} %eights.bytes to {EIGHTS}"""


def shorten_block(isa: PortableExponents, plan: tuple[int, ...]) -> str:
    """A block's exponents to its codes of the first level and its tail, whose length is returned."""
    (k1, k2, k3), book = plan, isa.book_bytes
    return f"""
define internal i64 @shorten_block{plan_name(plan)}(
    ptr %exponents, i64 %num, ptr noalias %codes, ptr noalias %tail, ptr noalias %tables, ptr noalias %books,
    ptr %ahead) noinline {{
  %table2 = getelementptr i8, ptr %tables, i64 {TABLE_BYTES}
  %table3 = getelementptr i8, ptr %tables, i64 {2 * TABLE_BYTES}
  %book2 = getelementptr i8, ptr %books, i64 {book}
  %book3 = getelementptr i8, ptr %books, i64 {2 * book}
  %n1 = call i64 @shorten{k1}(ptr %exponents, i64 %num, ptr %codes, ptr %tables, ptr %books, ptr %ahead)
  %codes2 = getelementptr i8, ptr %tail, i64 8
  %n2 = call i64 @shorten{k2}(ptr %exponents, i64 %n1, ptr %codes2, ptr %table2, ptr %book2, ptr %ahead)
  %groups2 = call i64 @groups(i64 %n1)
  %codes3 = getelementptr [{8 * k2} x i8], ptr %codes2, i64 %groups2
  %n3 = call i64 @shorten{k3}(ptr %exponents, i64 %n2, ptr %codes3, ptr %table3, ptr %book3, ptr %ahead)
  %groups3 = call i64 @groups(i64 %n2)
  %plain = getelementptr [{8 * k3} x i8], ptr %codes3, i64 %groups3
  call void @llvm.memcpy.p0.p0.i64(ptr %plain, ptr %exponents, i64 %n3, i1 false)
  %n2.high = shl i64 %n2, 16
  %n3.high = shl i64 %n3, 32
  %n12 = or i64 %n1, %n2.high
  %head = or i64 %n12, %n3.high
  store i64 %head, ptr %tail, align 1
{_tail_length()}
  ret i64 %length
}}"""


def restore_block(plan: tuple[int, ...]) -> str:
    """Undo ``shorten_block`` and say whether codes, numbers and the tail's ``size``, at least 8, agree."""
    k1, k2, k3 = plan
    return f"""
define internal i1 @restore_block{plan_name(plan)}(
    ptr noalias %codes, ptr noalias %tail, i64 %size, i64 %num, ptr noalias %tables, ptr noalias %exponents,
    ptr noalias %other, ptr %ahead) noinline {{
entry:
  %head = load i64, ptr %tail, align 1
  %n1 = and i64 %head, 65535
  %head2 = lshr i64 %head, 16
  %n2 = and i64 %head2, 65535
  %n3 = lshr i64 %head, 32
  %codes2 = getelementptr i8, ptr %tail, i64 8
  %groups2 = call i64 @groups(i64 %n1)
  %codes3 = getelementptr [{8 * k2} x i8], ptr %codes2, i64 %groups2
  %groups3 = call i64 @groups(i64 %n2)
  %plain = getelementptr [{8 * k3} x i8], ptr %codes3, i64 %groups3
{_tail_length()}
  %less1 = icmp ule i64 %n1, %num
  %less2 = icmp ule i64 %n2, %n1
  %less3 = icmp ule i64 %n3, %n2
  %exact = icmp eq i64 %length, %size
  %less12 = and i1 %less1, %less2
  %less = and i1 %less12, %less3
  %sound = and i1 %less, %exact
  br i1 %sound, label %levels, label %bad
levels:
  %table2 = getelementptr i8, ptr %tables, i64 {TABLE_BYTES}
  %table3 = getelementptr i8, ptr %tables, i64 {2 * TABLE_BYTES}
  call void @llvm.memcpy.p0.p0.i64(ptr %exponents, ptr %plain, i64 %n3, i1 false)
  %found3 = call i64 @restore{k3}(ptr %codes3, ptr %exponents, i64 %n3, i64 %n2,
                               ptr %table3, ptr %other, ptr %ahead)
  %found2 = call i64 @restore{k2}(ptr %codes2, ptr %other, i64 %n2, i64 %n1,
                               ptr %table2, ptr %exponents, ptr %ahead)
  %found1 = call i64 @restore{k1}(ptr %codes, ptr %exponents, i64 %n1, i64 %num,
                               ptr %tables, ptr %other, ptr %ahead)
  %same3 = icmp eq i64 %found3, %n3
  %same2 = icmp eq i64 %found2, %n2
  %same1 = icmp eq i64 %found1, %n1
  %same23 = and i1 %same2, %same3
  %agrees = and i1 %same23, %same1
  ret i1 %agrees
bad:
  ret i1 false
}}"""


def _tail_length() -> str:
    return """
  %plain.end = getelementptr i8, ptr %plain, i64 %n3
  %from.int = ptrtoint ptr %tail to i64
  %to.int = ptrtoint ptr %plain.end to i64
  %length = sub i64 %to.int, %from.int"""


WORD_BITS = (16, 32)
BLOCK_TAIL_BYTES = 8 + max(sum(plan[1:]) for plan in PLANS) * BLOCK // 8 + BLOCK

_GROUPS = BLOCK // GROUP
_SCRATCH = f"[{BLOCK + GROUP} x i8]"  # exponents of a block, and what a step writes or reads behind them

# Of the block that begins at group %first: its groups and exponents, and the group behind it.
_HERE = f"""  %left = sub i64 %groups, %first
  %here = call i64 @llvm.umin.i64(i64 %left, i64 {_GROUPS})
  %last = add i64 %first, %here
  %num = mul i64 %here, {GROUP}"""


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
  br i1 %fits, label %go, label %done
go:
{_HERE}
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
  %result = phi i64 [%end, %go], [-1, %block]
  {"fence seq_cst" if stream else ""}
  ret i64 %result
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
  br i1 %sound, label %go, label %done
go:
{_HERE}
  %codes.at = getelementptr [{8 * plan[0]} x i8], ptr %codes, i64 %first
  %remainders.at = getelementptr [{rest} x i8], ptr %remainders, i64 %first
  %tail.at = getelementptr i8, ptr %tail, i64 %begin
  %out.at = getelementptr [{GROUP} x i{bits}], ptr %out, i64 %first
  %agrees = call i1 @restore_block{name}(ptr %codes.at, ptr %tail.at, i64 %size, i64 %num, ptr %tables,
                                      ptr %other, ptr %exponents, ptr %remainders.at)
  br i1 %agrees, label %right, label %done
right:
  call void @join{bits}{s}(ptr %exponents, ptr %remainders.at, i64 %here, ptr %out.at)
  %b.next = add i64 %b, 1
  %all = icmp eq i64 %last, %groups
  br i1 %all, label %done, label %block
done:
  %result = phi i64 [%end, %right], [-1, %block], [-1, %go]
  {"fence seq_cst" if stream else ""}
  ret i64 %result
}}"""


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


def module(isa: PortableExponents) -> str:
    """Return the text of all kernels of an instruction set."""
    text = [_SHARED, isa.shared(), *map(count, WORD_BITS)]
    for k in sorted({k for plan in PLANS for k in plan}):
        text += [shorten(isa, k), restore(isa, k)]
    for plan in PLANS:
        text += [shorten_block(isa, plan), restore_block(plan)]
    for bits, stream in product(WORD_BITS, (False, True)):
        text += [split(bits, stream=stream), join(bits, stream=stream)]
        for plan in PLANS:
            text += [_pack(isa, bits, plan, stream=stream), _unpack(bits, plan, stream=stream)]
    return "\n".join(text)
