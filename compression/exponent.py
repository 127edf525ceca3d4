"""Exponent compression: dense floats use few exponents, so most travel as codes of 1 to 4 bits.

Tensors without zeros still shrink by a third (bfloat16) or a sixth (float32), at the speed of a copy. Sign
and mantissa travel as they are. Frequent exponents get a code of k bits; the code of k ones stands for all
others, the escapes. The frequent ones of these get codes of k bits again, once more, and the rest are plain
bytes. That is within a few per cent of the order-0 entropy of the exponents, and 64 are coded at once. In
float16 such a byte is the exponent and the three upper bits of the mantissa, which shrinks by 7 %.
Little-endian, sections at multiples of 64 bytes, zeros between, n words padded to N, a multiple of 64::

    plan        u8 k of levels 1, 2 and 3, 13 zeros; per level 16 bytes: the exponent of each code, zeros
    codes       of level 1, N x k bits, least significant first
    remainders  of words turned left by a bit, whose highest byte is the exponent; per 64 words: in float32
                64 x u16, the lower mantissa; 64 x u8, the upper mantissa and, as the lowest bit, the sign
    offsets     u64 per block of 4,096 words: where the block's tail ends, counted from the first one's begin
    tail        per block: u16 escapes of levels 1, 2 and 3, and 0; the codes of level 2, with codes 0 up to a
                multiple of 64; those of level 3 likewise; the escapes of level 3, a byte each

A padding word has the exponent of code 0, and its other bits are zero.
"""

import ctypes
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from .errors import CodecError
from .frame import ALIGNMENT, BLOCK, FLOATS, aligned
from .geometry import Words
from .kernels.exponent_ir import BLOCK_TAIL_BYTES, GROUP, NUM_LEVELS, PLANS, TABLE_BYTES, escape, kernel_name
from .raw import Codec, Packed, Raw
from .zero_value import STREAM_BYTES

_DTYPES = {torch.float16: 16, torch.bfloat16: 16, torch.float32: 32}
_PLAN_BYTES, _TABLES = 64, 16  # in bytes: the plan section, and where in it the tables are
_SHORTEST = 1024  # words; what is shorter does not pay
_RUNS = 128  # of 64 words each are counted
_LEAST_PERCENT = 102  # of before / after in the words counted; else all travel raw
_SCRATCH = ctypes.c_char * ((BLOCK + GROUP) * 4)  # words of a block and their padding


class Layout(NamedTuple):
    """Begins and ends of a payload's sections, in bytes from its start."""

    codes_per_group: int  # bytes for 64 words
    remainders_per_group: int
    codes_end: int
    remainders: int
    offsets: int
    offsets_end: int
    tail: int


@lru_cache(maxsize=1024)
def layout(num_words: int, bits: int, k: int) -> Layout:
    """The sections of ``num_words`` words of ``bits`` bits whose first codes have ``k`` bits."""
    num_groups = -(-num_words // GROUP)
    codes, rest = k * GROUP // 8, (bits // 8 - 1) * GROUP
    codes_end = _PLAN_BYTES + num_groups * codes
    remainders = aligned(codes_end)
    offsets = remainders + num_groups * rest
    offsets_end = offsets + 8 * -(-num_words // BLOCK)
    return Layout(codes, rest, codes_end, remainders, offsets, offsets_end, aligned(offsets_end))


class Exponent(Codec):
    """Codes, remainders and tail as above for floats of 32 or 16 bits; raw where that is not shorter."""

    name, dtypes = "exponent", FLOATS

    def max_bytes(self, num_words: int, bits: int) -> int:
        return num_words * bits // 8 + (BLOCK_TAIL_BYTES if num_words >= _SHORTEST else 0)

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        if bits not in _DTYPES.values() or not num_words:
            return False
        return layout(num_words, bits, min(PLANS)[0]).tail < num_bytes < num_words * bits // 8

    def pack(self, words: Words, out: int) -> Packed:
        if words.dtype in _DTYPES and words.num_words >= _SHORTEST:
            num_bytes = self._pack(words, out)
            if num_bytes < words.num_bytes:
                return Packed(self.name, num_bytes)
        return Raw().pack(words, out)

    def _pack(self, words: Words, out: int) -> int:
        """Write all sections and return their length; that of the words if it gave up."""
        counts, runs, bits = np.zeros(256, np.int64), min(_RUNS, words.num_words // GROUP), words.bits
        count = self.kernel(f"count{bits}")
        count(words.address, words.num_words - GROUP + 1, runs, counts.ctypes.data)
        section = plan_section(counts, bits)
        plan = tuple(section[:NUM_LEVELS])
        parts = layout(words.num_words, bits, plan[0])
        if plan not in PLANS or parts.tail >= words.num_bytes:
            return words.num_bytes
        ctypes.memmove(out, section, len(section))
        ctypes.memset(out + parts.codes_end, 0, parts.remainders - parts.codes_end)
        ctypes.memset(out + parts.offsets_end, 0, parts.tail - parts.offsets_end)
        limit = words.num_bytes - parts.tail

        def blocks(source: int, num_words: int, first: int, start: int, *, stream: bool = False) -> int:
            """Pack from block ``first`` on, whose tail starts at ``start``; return its last end."""
            kernel = self.kernel(kernel_name("pack", bits, plan, stream=stream))
            at = _sections(out, parts, first)
            return kernel(source, -(-num_words // GROUP), out + _TABLES, *at, start, limit)

        (whole, rest), end = divmod(words.num_words, BLOCK), 0
        if whole:
            stream = out % ALIGNMENT == 0 and words.num_bytes >= STREAM_BYTES
            end = blocks(words.address, whole * BLOCK, 0, 0, stream=stream)
        if rest and end >= 0:
            scratch, used = _SCRATCH(), rest * bits // 8
            padding = (section[_TABLES] << (bits - 9)).to_bytes(bits // 8, "little") * (-rest % GROUP)
            room = ctypes.addressof(scratch)
            ctypes.memmove(room, words.address + words.num_bytes - used, used)
            ctypes.memmove(room + used, padding, len(padding))
            end = blocks(room, rest, whole, end)
        return parts.tail + end if end >= 0 else words.num_bytes

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        plan = tuple(ctypes.string_at(payload, min(num_bytes, NUM_LEVELS)))
        if plan not in PLANS or _DTYPES.get(out.dtype) != out.bits:
            rule = f"an exponent frame has floats and codes of {', '.join(map(str, PLANS))} bits"
            raise CodecError(f"{rule}, found {out.dtype} and {plan}; it was damaged")
        parts = layout(out.num_words, out.bits, plan[0])
        count = num_bytes - parts.tail

        def blocks(to: int, num_words: int, first: int, start: int, *, stream: bool = False) -> int:
            """Unpack from block ``first`` on, whose tail starts at ``start``."""
            kernel = self.kernel(kernel_name("unpack", out.bits, plan, stream=stream))
            at = _sections(payload, parts, first)
            return kernel(*at, start, count, -(-num_words // GROUP), payload + _TABLES, to)

        (whole, rest), end = divmod(out.num_words, BLOCK), min(count, 0)
        if whole and end >= 0:
            stream = out.address % ALIGNMENT == 0 and out.num_bytes >= STREAM_BYTES
            end = blocks(out.address, whole * BLOCK, 0, 0, stream=stream)
        if rest and end >= 0:
            scratch, used = _SCRATCH(), rest * out.bits // 8
            room = ctypes.addressof(scratch)
            end = blocks(room, rest, whole, end)
            ctypes.memmove(out.address + out.num_bytes - used, room, used)
        if end < 0 or end != count:
            rule = f"codes, offsets and tail of an exponent frame agree with its {num_bytes} bytes"
            raise CodecError(f"{rule}, these do not; it was damaged")


def _sections(payload: int, parts: Layout, num_blocks: int) -> tuple[int, int, int, int]:
    """Addresses of codes, remainders and offsets behind ``num_blocks`` blocks, and of the tail."""
    num_groups = num_blocks * BLOCK // GROUP
    codes = payload + _PLAN_BYTES + num_groups * parts.codes_per_group
    remainders = payload + parts.remainders + num_groups * parts.remainders_per_group
    return codes, remainders, payload + parts.offsets + 8 * num_blocks, payload + parts.tail


def plan_section(counts: np.ndarray, bits: int) -> bytes:
    """The plan that shortens words of ``bits`` bits most, by how often each exponent was counted.

    Returns: the section, which starts with zeros where no plan pays.
    """
    ranked = np.argsort(-counts, kind="stable")
    up_to = counts[ranked].cumsum().tolist()  # how many the first exponents cover

    def cost(plan: tuple[int, ...]) -> int:
        left, known, num_bits = up_to[-1], 0, 0
        for k in plan:
            num_bits, known = num_bits + k * left, known + escape(k)
            left = up_to[-1] - up_to[known - 1]
        return num_bits + 8 * left

    plan, text = min(PLANS, key=cost), ranked.astype(np.uint8).tobytes()
    pays = 100 * up_to[-1] * bits >= _LEAST_PERCENT * (up_to[-1] * (bits - 8) + cost(plan))
    section, known = (bytes(plan) if pays else b"").ljust(_TABLES, b"\0"), 0
    for k in plan:
        section += text[known : known + escape(k)].ljust(TABLE_BYTES, b"\0")
        known += escape(k)
    return section
