"""What the loops of all kernels have in common, as textual LLVM IR: the blocks, the last of them partial.

A partial block runs as a whole one in memory of the kernel's own, so a step has no edge to mind.
"""

from __future__ import annotations

from ..frame import BLOCK
from .isa import InstructionSet

BITMAP = BLOCK // 8  # bytes of a block's bitmap
_AHEAD = 2048  # bytes to prefetch ahead: the hardware does not follow the value stream


def copy(target: str, source: str, num_bytes: str) -> str:
    """Copy ``num_bytes``."""
    return f"call void @llvm.memcpy.p0.p0.i64(ptr %{target}, ptr %{source}, i64 %{num_bytes}, i1 false)"


def clear(target: str, num_bytes: int) -> str:
    """Write ``num_bytes`` zeros."""
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


def steps(isa: InstructionSet, body: str, *, start: str, values: str, ahead: str) -> str:
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
