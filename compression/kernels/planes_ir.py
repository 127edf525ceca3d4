"""The kernels of ``byte_plane`` as textual LLVM IR: words to planes of bytes and back.

A float is rotated left by one bit first, so that its exponent is one clean byte (or eight bits of fp16 and
fp64) and the sign joins the mantissa, which nothing compresses anyway.

    split{N}  (source, words, rotate, planes): byte k of every word to the plane k
    join{N}   (planes, words, rotate, out): undoes it

N is the bits of a word, ``rotate`` 0 or 1, ``planes`` the addresses of N / 8 planes, least significant byte
first. Nothing is read or written beyond the words; addresses need no alignment.
"""

from __future__ import annotations

BITS = (16, 32, 64)
_LANES = 64


def _loop(name: str, body: str, start: str, end: str, back: str, step: int) -> str:
    """``body`` for %{name}.i from ``start`` to ``end``; it may run no time at all, then goes to %{back}."""
    return f"""{name}.test:
  %{name}.any = icmp ult i64 {start}, {end}
  br i1 %{name}.any, label %{name}, label %{back}
{name}:
  %{name}.i = phi i64 [{start}, %{name}.test], [%{name}.next, %{name}]
{body}
  %{name}.next = add i64 %{name}.i, {step}
  %{name}.more = icmp ult i64 %{name}.next, {end}
  br i1 %{name}.more, label %{name}, label %{back}"""


def _turned(t: str, source: str, vector: str, bits: int, lanes: int, *, left: bool) -> str:
    """``%{t}.turned``: the words ``source`` rotated by %rotate."""
    cut = f"  %{t}.r = trunc i64 %rotate to i{bits}\n" if bits < 64 else f"  %{t}.r = add i64 %rotate, 0\n"
    turn = f"call {vector} @llvm.{'fshl' if left else 'fshr'}.v{lanes}i{bits}"
    return f"""{cut}  %{t}.one = insertelement {vector} poison, i{bits} %{t}.r, i64 0
  %{t}.by = shufflevector {vector} %{t}.one, {vector} poison, <{lanes} x i32> zeroinitializer
  %{t}.turned = {turn}({vector} {source}, {vector} {source}, {vector} %{t}.by)"""


def _split(t: str, bits: int, lanes: int) -> str:
    vector, bytes_ = f"<{lanes} x i{bits}>", f"<{lanes} x i8>"
    lines = [
        f"  %{t}.from = getelementptr i{bits}, ptr %words.at, i64 %{t}.i",
        f"  %{t}.words = load {vector}, ptr %{t}.from, align 1",
        _turned(t, f"%{t}.words", vector, bits, lanes, left=True),
    ]
    for k in range(bits // 8):
        lines += [
            f"  %{t}.down{k} = lshr {vector} %{t}.turned, splat (i{bits} {8 * k})",
            f"  %{t}.byte{k} = trunc {vector} %{t}.down{k} to {bytes_}",
            f"  %{t}.to{k} = getelementptr i8, ptr %plane{k}, i64 %{t}.i",
            f"  store {bytes_} %{t}.byte{k}, ptr %{t}.to{k}, align 1",
        ]
    return "\n".join(lines)


def _join(t: str, bits: int, lanes: int) -> str:
    vector, bytes_ = f"<{lanes} x i{bits}>", f"<{lanes} x i8>"
    lines, whole = [], "zeroinitializer"
    for k in range(bits // 8):
        lines += [
            f"  %{t}.from{k} = getelementptr i8, ptr %plane{k}, i64 %{t}.i",
            f"  %{t}.byte{k} = load {bytes_}, ptr %{t}.from{k}, align 1",
            f"  %{t}.wide{k} = zext {bytes_} %{t}.byte{k} to {vector}",
            f"  %{t}.up{k} = shl {vector} %{t}.wide{k}, splat (i{bits} {8 * k})",
            f"  %{t}.word{k} = or {vector} {whole}, %{t}.up{k}",
        ]
        whole = f"%{t}.word{k}"
    lines += [
        _turned(t, whole, vector, bits, lanes, left=False),
        f"  %{t}.to = getelementptr i{bits}, ptr %words.at, i64 %{t}.i",
        f"  store {vector} %{t}.turned, ptr %{t}.to, align 1",
    ]
    return "\n".join(lines)


def _function(verb: str, bits: int) -> str:
    body = _split if verb == "split" else _join
    first, last = ("words.at", "planes") if verb == "split" else ("planes", "words.at")
    at = "\n".join(
        f"  %at{k} = getelementptr ptr, ptr %planes, i64 {k}\n  %plane{k} = load ptr, ptr %at{k}, align 1"
        for k in range(bits // 8)
    )
    order = f"ptr noalias %{first}, i64 %words, i64 %rotate, ptr noalias %{last}"
    kind, many, one = "fshl" if verb == "split" else "fshr", f"<{_LANES} x i{bits}>", f"<1 x i{bits}>"
    return f"""
declare {many} @llvm.{kind}.v{_LANES}i{bits}({many}, {many}, {many})
declare {one} @llvm.{kind}.v1i{bits}({one}, {one}, {one})
define void @{verb}{bits}({order}) {{
entry:
{at}
  %whole = and i64 %words, {-_LANES}
  br label %many.test
{_loop("many", body("many", bits, _LANES), "0", "%whole", "one.test", _LANES)}
{_loop("one", body("one", bits, 1), "%whole", "%words", "done", 1)}
done:
  ret void
}}"""


def module() -> str:
    """Return the text of all kernels."""
    return "\n".join(_function(verb, bits) for verb in ("split", "join") for bits in BITS)
