"""What a kernel does in one step, one instruction set per class, as textual LLVM IR.

A step packs or unpacks as many words as the instruction set takes at once; ``ir`` has the loops around it.
"""

from __future__ import annotations

from typing import Protocol


class InstructionSet(Protocol):
    """One way to run a step of ``lanes`` words of ``bits`` bits."""

    name: str
    streams: bool  # has stores past the cache
    unroll: int
    bits: int
    lanes: int

    def __init__(self, bits: int) -> None: ...

    def declarations(self) -> list[str]:
        """The intrinsics that its steps call."""
        ...

    def pack_step(self) -> str:
        """Words from %from to %at, defining %mask and %next, the number of values so far."""
        ...

    def unpack_step(self, t: str, *, exact: bool, store: str) -> str:
        """Values from %{t}at by %{t}mask to %{t}to; ``exact`` reads no more than the mask has."""
        ...


class Avx512:
    """A 512-bit register a step, compressed in the register: to memory it is microcoded on Zen 4."""

    name = "avx512"
    streams = True
    unroll = 4

    def __init__(self, bits: int) -> None:
        self.bits, self.lanes = bits, 512 // bits
        self.vector, self.bools = f"<{self.lanes} x i{bits}>", f"<{self.lanes} x i1>"

    def declarations(self) -> list[str]:
        """Compress and expand."""
        vector, bools, shape = self.vector, self.bools, f"v{self.lanes}i{self.bits}"
        return [
            f"declare {vector} @llvm.x86.avx512.mask.compress.{shape}({vector}, {vector}, {bools})",
            f"declare {vector} @llvm.x86.avx512.mask.expand.{shape}({vector}, {vector}, {bools})",
            f"declare {vector} @llvm.masked.expandload.{shape}(ptr, {bools}, {vector})",
        ]

    def pack_step(self) -> str:
        """The full register is stored, hence the slack behind the values."""
        v, b, m, shape = self.vector, self.bools, f"i{self.lanes}", f"v{self.lanes}i{self.bits}"
        return f"""
  %x = load {v}, ptr %from, align 1
  %set = icmp ne {v} %x, zeroinitializer
  %mask = bitcast {b} %set to {m}
  %y = call {v} @llvm.x86.avx512.mask.compress.{shape}({v} %x, {v} zeroinitializer, {b} %set)
  store {v} %y, ptr %at, align 1
{count(self.lanes, "mask", "ones")}
  %next = add i64 %k, %ones"""

    def unpack_step(self, t: str, *, exact: bool, store: str) -> str:
        """A register is loaded and expanded; ``exact`` expands while loading and touches no value more."""
        v, b, m, shape = self.vector, self.bools, f"i{self.lanes}", f"v{self.lanes}i{self.bits}"
        bits, zeros = f"{b} %{t}set", f"{v} zeroinitializer"
        load = f"%{t}x = load {v}, ptr %{t}at, align 1"
        expand = f"@llvm.x86.avx512.mask.expand.{shape}({v} %{t}x, {zeros}, {bits})"
        if exact:
            load, expand = "", f"@llvm.masked.expandload.{shape}(ptr %{t}at, {bits}, {zeros})"
        return f"""
  %{t}set = bitcast {m} %{t}mask to {b}
  {load}
  %{t}y = call {v} {expand}
  store {v} %{t}y, ptr %{t}to, {store}"""


class Portable:
    """Eight words a step, one by one without a branch: any little-endian CPU that LLVM knows."""

    name = "portable"
    streams = False
    unroll = 1
    lanes = 8

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def declarations(self) -> list[str]:
        """None."""
        return []

    def pack_step(self) -> str:
        """Every word is stored, and the place moves on only if it was not zero."""
        word, text, k = f"i{self.bits}", "  %m0 = add i64 0, 0", "%k"
        for j in range(8):
            k, before = "%next" if j == 7 else f"%k{j}", k
            text += f"""
  %from{j} = getelementptr {word}, ptr %from, i64 {j}
  %x{j} = load {word}, ptr %from{j}, align 1
  %at{j} = getelementptr {word}, ptr %values, i64 {before}
  store {word} %x{j}, ptr %at{j}, align 1
  %set{j} = icmp ne {word} %x{j}, 0
  %one{j} = zext i1 %set{j} to i64
  {k} = add i64 {before}, %one{j}
  %bit{j} = shl i64 %one{j}, {j}
  %m{j + 1} = or i64 %m{j}, %bit{j}"""
        return text + "\n  %mask = trunc i64 %m8 to i8"

    def unpack_step(self, t: str, *, exact: bool, store: str) -> str:
        """The next value is read for every word and cleared where there is no bit; or %nothing is read."""
        word, text, k = f"i{self.bits}", f"  %{t}m = zext i8 %{t}mask to i64", f"%{t}k"
        narrow = "or" if self.bits == 64 else "trunc"
        for j in range(8):
            source = f"getelementptr i8, ptr %{t}at{j}, i64 0"
            if exact:
                source = f"select i1 %{t}set{j}, ptr %{t}at{j}, ptr %nothing"
            text += f"""
  %{t}m{j} = lshr i64 %{t}m, {j}
  %{t}one{j} = and i64 %{t}m{j}, 1
  %{t}set{j} = trunc i64 %{t}m{j} to i1
  %{t}bit{j} = {narrow} i64 %{t}one{j}{", 0" if self.bits == 64 else f" to {word}"}
  %{t}wide{j} = sub {word} 0, %{t}bit{j}
  %{t}at{j} = getelementptr {word}, ptr %values, i64 {k}
  %{t}source{j} = {source}
  %{t}x{j} = load {word}, ptr %{t}source{j}, align 1
  %{t}y{j} = and {word} %{t}x{j}, %{t}wide{j}
  %{t}to{j} = getelementptr {word}, ptr %{t}to, i64 {j}
  store {word} %{t}y{j}, ptr %{t}to{j}, align 1
  %{t}k{j} = add i64 {k}, %{t}one{j}"""
            k = f"%{t}k{j}"
        return text


def count(lanes: int, mask: str, ones: str) -> str:
    """%{ones} = the bits set in %{mask}, as i64."""
    widen = f"or i64 %{mask}, 0" if lanes == 64 else f"zext i{lanes} %{mask} to i64"
    return f"  %{ones}.wide = {widen}\n  %{ones} = call i64 @llvm.ctpop.i64(i64 %{ones}.wide)"
