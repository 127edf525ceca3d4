"""The kernels of ``byte_plane`` as textual LLVM IR: words to planes of bytes and back.

A float is rotated left by one bit first, so that its exponent is one clean byte (or eight bits of fp16 and
fp64) and the sign joins the mantissa, which nothing compresses anyway.

    split{N}  (source, words, rotate, planes): byte k of every word to the plane k
    join{N}   (planes, words, rotate, out): undoes it

N is the bits of a word, ``rotate`` 0 or 1, ``planes`` the addresses of N / 8 planes, least significant byte
first. Nothing is read or written beyond the words; addresses need no alignment. The loops go word by word:
LLVM makes vectors of 64 words of them, and is told that planes and words do not overlap.
"""

BITS = (16, 32, 64)
_ACCESS = "align 1, !llvm.access.group !0"


def _split(bits: int) -> str:
    word = f"i{bits}"
    body = f"""
  %x = load {word}, ptr %at, {_ACCESS}
  %turned = call {word} @llvm.fshl.{word}({word} %x, {word} %x, {word} %by)"""
    for k in range(bits // 8):
        body += f"""
  %down{k} = lshr {word} %turned, {8 * k}
  %byte{k} = trunc {word} %down{k} to i8
  store i8 %byte{k}, ptr %byte.at{k}, {_ACCESS}"""
    return body


def _join(bits: int) -> str:
    word, body, whole = f"i{bits}", "", "0"
    for k in range(bits // 8):
        body += f"""
  %byte{k} = load i8, ptr %byte.at{k}, {_ACCESS}
  %wide{k} = zext i8 %byte{k} to {word}
  %up{k} = shl {word} %wide{k}, {8 * k}
  %word{k} = or {word} {whole}, %up{k}"""
        whole = f"%word{k}"
    return f"""{body}
  %x = call {word} @llvm.fshr.{word}({word} {whole}, {word} {whole}, {word} %by)
  store {word} %x, ptr %at, {_ACCESS}"""


def _function(verb: str, bits: int) -> str:
    word, planes = f"i{bits}", range(bits // 8)
    begin = [
        f"  %at{k} = getelementptr ptr, ptr %planes, i64 {k}\n  %plane{k} = load ptr, ptr %at{k}, align 1"
        for k in planes
    ]
    begin.append("  %by = trunc i64 %rotate to " + word if bits < 64 else "  %by = add i64 %rotate, 0")
    places = (f"  %byte.at{k} = getelementptr i8, ptr %plane{k}, i64 %i" for k in planes)
    first, last = ("words.at", "planes") if verb == "split" else ("planes", "words.at")
    return f"""
declare {word} @llvm.{"fshl" if verb == "split" else "fshr"}.{word}({word}, {word}, {word})
define void @{verb}{bits}(ptr noalias %{first}, i64 %words, i64 %rotate, ptr noalias %{last}) {{
entry:
{chr(10).join(begin)}
  %none = icmp eq i64 %words, 0
  br i1 %none, label %done, label %loop
loop:
  %i = phi i64 [0, %entry], [%next, %loop]
  %at = getelementptr {word}, ptr %words.at, i64 %i
{chr(10).join(places)}
{(_split if verb == "split" else _join)(bits)}
  %next = add nuw nsw i64 %i, 1
  %all = icmp eq i64 %next, %words
  br i1 %all, label %done, label %loop, !llvm.loop !1
done:
  ret void
}}"""


_LOOP = """
!0 = distinct !{}
!1 = distinct !{!1, !2, !3, !4}
!2 = !{!"llvm.loop.parallel_accesses", !0}
!3 = !{!"llvm.loop.vectorize.enable", i1 true}
!4 = !{!"llvm.loop.vectorize.width", i32 64}"""


def module() -> str:
    return "".join(_function(verb, bits) for verb in ("split", "join") for bits in BITS) + _LOOP
