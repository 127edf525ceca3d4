"""The kernels of ``narrow`` as textual LLVM IR: the range of words, and words of any width bit-packed.

A row is a vector of 512 bits, whose lanes are words; lane ``l`` of all rows is a stream of bits of its own,
least significant first. So nothing crosses a lane: the shifts are the same for the whole vector, any width
runs through the same loop, and on a GPU a thread takes a lane.

    range{N}   (source, words, bias, out): the least and the largest word, compared as ``word ^ bias``, to
               out; of at least one word
    pack{N}    (source, rows, width, base, out): the low ``width`` bits of ``word - base``
    unpack{N}  (payload, rows, width, base, last, out): undoes it; ``last`` is the payload's last row
    stream{N}  unpack with stores past the cache; out at a multiple of 64

N is the bits of a word, 1 <= width < N. ``pack`` writes ceil(rows * width / N) rows; only where ``rows`` is a
multiple of N is the last one full, so that another call can go on behind it. Nothing is read or written
beyond the rows; addresses need no alignment.

Source: Lemire and Boytsov, Decoding billions of integers per second through vectorization, Software: Practice
and Experience 45, 2015 (vertical layout).
"""

ROW_BYTES = 64
BITS = (8, 16, 32, 64)
_UNROLL = 4


def _splat(name: str, value: str, bits: int) -> str:
    vector = f"<{512 // bits} x i{bits}>"
    word = value if bits == 64 else f"%{name}.word"
    cut = "" if bits == 64 else f"  {word} = trunc i64 {value} to i{bits}\n"
    zeros = f"<{512 // bits} x i32> zeroinitializer"
    return f"""{cut}  %{name}.one = insertelement {vector} poison, i{bits} {word}, i64 0
  %{name} = shufflevector {vector} %{name}.one, {vector} poison, {zeros}"""


def _range(bits: int) -> str:
    word = f"i{bits}"
    cut = f"trunc i64 %bias to {word}" if bits < 64 else "add i64 %bias, 0"
    return f"""
declare {word} @llvm.umin.{word}({word}, {word})
declare {word} @llvm.umax.{word}({word}, {word})
define void @range{bits}(ptr noalias %source, i64 %words, i64 %bias, ptr noalias %out) {{
entry:
  %flip = {cut}
  br label %word
word:
  %i = phi i64 [0, %entry], [%i.next, %word]
  %least = phi {word} [-1, %entry], [%low, %word]
  %most = phi {word} [0, %entry], [%high, %word]
  %from = getelementptr {word}, ptr %source, i64 %i
  %x = load {word}, ptr %from, align 1
  %key = xor {word} %x, %flip
  %low = call {word} @llvm.umin.{word}({word} %least, {word} %key)
  %high = call {word} @llvm.umax.{word}({word} %most, {word} %key)
  %i.next = add nuw nsw i64 %i, 1
  %all = icmp eq i64 %i.next, %words
  br i1 %all, label %done, label %word, !llvm.loop !3
done:
  store {word} %low, ptr %out, align 1
  %second = getelementptr {word}, ptr %out, i64 1
  store {word} %high, ptr %second, align 1
  ret void
}}"""


def _pack(bits: int) -> str:
    """A row fills up to the word's end; what is left of it begins the next one. No branch depends on it."""
    vector, last = f"<{512 // bits} x i{bits}>", bits - 1
    return f"""
define void @pack{bits}(ptr noalias %source, i64 %rows, i64 %width, i64 %base, ptr noalias %out) {{
entry:
{_splat("least", "%base", bits)}
  br label %row
row:
  %i = phi i64 [0, %entry], [%i.next, %row]
  %k = phi i64 [0, %entry], [%k.next, %row]
  %used = phi i64 [0, %entry], [%used.next, %row]
  %begun = phi {vector} [zeroinitializer, %entry], [%begun.next, %row]
  %from = getelementptr {vector}, ptr %source, i64 %i
  %words = load {vector}, ptr %from, align 1
  %value = sub {vector} %words, %least
{_splat("up", "%used", bits)}
  %placed = shl {vector} %value, %up
  %filled = or {vector} %begun, %placed
  %to = getelementptr {vector}, ptr %out, i64 %k
  store {vector} %filled, ptr %to, align 1
  %free = sub i64 {last}, %used
{_splat("down", "%free", bits)}
  %half = lshr {vector} %value, splat (i{bits} 1)
  %rest = lshr {vector} %half, %down
  %end = add i64 %used, %width
  %full = icmp uge i64 %end, {bits}
  %begun.next = select i1 %full, {vector} %rest, {vector} %filled
  %used.next = and i64 %end, {last}
  %step = zext i1 %full to i64
  %k.next = add i64 %k, %step
  %i.next = add i64 %i, 1
  %all = icmp eq i64 %i.next, %rows
  br i1 %all, label %done, label %row, !llvm.loop !1
done:
  %open = icmp ne i64 %used.next, 0
  br i1 %open, label %close, label %end.of.rows
close:
  %at = getelementptr {vector}, ptr %out, i64 %k.next
  store {vector} %begun.next, ptr %at, align 1
  br label %end.of.rows
end.of.rows:
  ret void
}}"""


def _unpack(bits: int, *, stream: bool) -> str:
    vector, last = f"<{512 // bits} x i{bits}>", bits - 1
    name, store = ("stream", "align 64, !nontemporal !0") if stream else ("unpack", "align 1")
    fence = "fence seq_cst" if stream else ""
    return f"""
define void @{name}{bits}(ptr noalias %payload, i64 %rows, i64 %width, i64 %base, i64 %last,
                          ptr noalias %out) {{
entry:
{_splat("least", "%base", bits)}
  %blank = sub i64 {bits}, %width
{_splat("gap", "%blank", bits)}
  %mask = lshr {vector} splat (i{bits} -1), %gap
  br label %row
row:
  %i = phi i64 [0, %entry], [%i.next, %row]
  %bit = phi i64 [0, %entry], [%bit.next, %row]
  %k = udiv i64 %bit, {bits}
  %used = and i64 %bit, {last}
  %k.more = add i64 %k, 1
  %k.next = call i64 @llvm.umin.i64(i64 %k.more, i64 %last)
  %from = getelementptr {vector}, ptr %payload, i64 %k
  %low.row = load {vector}, ptr %from, align 1
  %more = getelementptr {vector}, ptr %payload, i64 %k.next
  %high.row = load {vector}, ptr %more, align 1
{_splat("down", "%used", bits)}
  %low = lshr {vector} %low.row, %down
  %free = sub i64 {last}, %used
{_splat("up", "%free", bits)}
  %twice = shl {vector} %high.row, splat (i{bits} 1)
  %high = shl {vector} %twice, %up
  %both = or {vector} %low, %high
  %value = and {vector} %both, %mask
  %words = add {vector} %value, %least
  %to = getelementptr {vector}, ptr %out, i64 %i
  store {vector} %words, ptr %to, {store}
  %bit.next = add i64 %bit, %width
  %i.next = add i64 %i, 1
  %all = icmp eq i64 %i.next, %rows
  br i1 %all, label %done, label %row, !llvm.loop !1
done:
  {fence}
  ret void
}}"""


def module() -> str:
    loops = []
    for bits in BITS:
        loops += [_range(bits), _pack(bits), _unpack(bits, stream=False), _unpack(bits, stream=True)]
    unrolled = f'!1 = distinct !{{!1, !2}}\n!2 = !{{!"llvm.loop.unroll.count", i32 {_UNROLL}}}'
    vectors = '!3 = distinct !{!3, !4}\n!4 = !{!"llvm.loop.vectorize.enable", i1 true}'
    return "\n".join([*loops, "!0 = !{i32 1}", unrolled, vectors])
