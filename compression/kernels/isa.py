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

    def globals(self) -> list[str]:
        """The intrinsics that its steps call, and their tables."""
        ...

    def pack_step(self, *, masked: bool) -> str:
        """Words from %plain to %packed: those at the bits of %mask, or those not zero, which define %mask.

        Defines %next: the number of values %k and those of this step. May write 64 bytes from %packed on.
        """
        ...

    def unpack_step(self, *, stream: bool) -> str:
        """Values from %packed by %mask to %plain; defines %next. May read a value for every lane."""
        ...


class Avx512:
    """A 512-bit register a step, compressed in the register: to memory it is microcoded on Zen 4."""

    name = "avx512"
    streams = True
    unroll = 4

    def __init__(self, bits: int) -> None:
        self.bits, self.lanes = bits, 512 // bits
        self.vector, self.bools = f"<{self.lanes} x i{bits}>", f"<{self.lanes} x i1>"
        self.shape = f"v{self.lanes}i{bits}"

    def globals(self) -> list[str]:
        """Compress and expand."""
        vector, bools = self.vector, self.bools
        return [
            f"declare {vector} @llvm.x86.avx512.mask.{verb}.{self.shape}({vector}, {vector}, {bools})"
            for verb in ("compress", "expand")
        ]

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
        """A register is loaded and expanded."""
        v, b, m = self.vector, self.bools, f"i{self.lanes}"
        return f"""
  %set = bitcast {m} %mask to {b}
  %x = load {v}, ptr %packed, align 1
  %y = call {v} @llvm.x86.avx512.mask.expand.{self.shape}({v} %x, {v} zeroinitializer, {b} %set)
  store {v} %y, ptr %plain, {place(64, stream=stream)}
{count("mask", self.lanes, "ones")}
  %next = add i64 %k, %ones"""


class Portable:
    """Eight words a step, one by one without a branch: any little-endian CPU that LLVM knows."""

    name = "portable"
    streams = False
    unroll = 1
    lanes = 8

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def globals(self) -> list[str]:
        """None."""
        return []

    def pack_step(self, *, masked: bool) -> str:
        """Every word is stored, and the place moves on only if its bit is set.

        Volatile, or LLVM takes the words out of the register that was compared, which is slower.
        """
        word, vector = f"i{self.bits}", f"<8 x i{self.bits}>"
        text = (
            ""
            if masked
            else f"""
  %x = load {vector}, ptr %plain, align 1
  %set = icmp ne {vector} %x, zeroinitializer
  %mask = bitcast <8 x i1> %set to i8"""
        )
        text += "\n  %m = zext i8 %mask to i64\n  %n0 = add i64 0, 0"
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
        """The next value is read for every word and cleared where there is no bit; a choice would jump."""
        assert not stream, "these stores go through the cache"
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
  store {word} %y{j}, ptr %plain{j}, align 1
  %n{j + 1} = add i64 %n{j}, %one{j}"""
        return text + "\n  %next = add i64 %k, %n8"


def count(mask: str, lanes: int, ones: str) -> str:
    """%{ones} = the bits set in %{mask}, as i64."""
    widen = f"or i64 %{mask}, 0" if lanes == 64 else f"zext i{lanes} %{mask} to i64"
    return f"  %{ones}.wide = {widen}\n  %{ones} = call i64 @llvm.ctpop.i64(i64 %{ones}.wide)"


def place(num_bytes: int, *, stream: bool) -> str:
    """How a store of ``num_bytes`` goes: past the cache, to a multiple of them, or anywhere."""
    return f"align {num_bytes}, !nontemporal !0" if stream else "align 1"
