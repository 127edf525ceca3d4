"""The zero-value loops in Triton: one program per block of 4,096 words, the same bytes as the CPU's.

A program learns where its values go from a scan of all blocks' counts, never from an atomic counter, whose
order would change from run to run; and whether a tensor pays is decided on the device, so nothing here makes
the host wait. Words are integers: comparing floats would lose -0.0 and flush denormals.

Source: Rhu et al., Compressing DMA Engine, HPCA 2018, section 4 (zero-value compression).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..frame import BLOCK, sections
from ..names import CODEC_NAMES
from ..zero_value import _LONG, _MOST, _PART
from .payloads import new_facts, no_error, options, pack_raw

GOLDEN, MIX = tl.constexpr(0x9E3779B97F4A7C15), tl.constexpr(0xD6E8FEB86659FD93)


@triton.jit
def ones_of(x):
    """The set bits of 32-bit words; the compiler makes it one instruction."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def low_bits(count):
    """The ``count`` lowest bits of a 32-bit word set, for any ``count``."""
    count = tl.minimum(tl.maximum(count, 0), 32).to(tl.uint64)
    return ((tl.full(count.shape, 1, tl.uint64) << count) - 1).to(tl.uint32)


@triton.jit
def bits_of_block(bitmap, block, num_words, BLOCK: tl.constexpr):
    """The bitmap of a block as 32-bit words, without what stands beyond its last element."""
    row = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    bits = tl.load(bitmap + row, mask=row * 32 < num_words, other=0).to(tl.uint32, bitcast=True)
    return bits, bits & low_bits(num_words - row * 32)


@triton.jit
def places(bits, BLOCK: tl.constexpr):
    """Words of a block whose bit is set, and the number of set bits before each: [BLOCK/32, 32].

    A scan over the counts of 32-bit words and a count within each: static shuffles, where a scan over all
    words would go through shared memory.
    """
    bit = tl.arange(0, 32)
    ones = ones_of(bits)
    before = tl.cumsum(ones, axis=0) - ones
    lower = low_bits(bit)
    place = before[:, None] + ones_of(bits[:, None] & lower[None, :])
    return ((bits[:, None] >> bit[None, :].to(tl.uint32)) & 1) != 0, place


@triton.jit
def words_of_block(block, BLOCK: tl.constexpr):
    """Places of the words of a block: [BLOCK/32, 32]."""
    return block * BLOCK + tl.arange(0, BLOCK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def start_of_block(offsets, block):
    return tl.load(offsets + block - 1, mask=block > 0, other=0)


@triton.jit
def count_words(words, bitmap, counts, num_words, bitmap_rows, BLOCK: tl.constexpr):
    """Write the bitmap of a block, padded with zeros, and how many of its words are not zero."""
    block = tl.program_id(0).to(tl.int64)
    i = words_of_block(block, BLOCK)
    word = tl.load(words + i, mask=i < num_words, other=0)
    used = (word != 0).to(tl.uint32)
    # Bits are disjoint, so their sum is their union. Which lane holds which word is the compiler's choice:
    # that rules out a ballot.
    bits = tl.sum(used << tl.arange(0, 32)[None, :].to(tl.uint32), axis=1).to(tl.uint32)
    row = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    tl.store(bitmap + row, bits.to(tl.int32, bitcast=True), mask=row < bitmap_rows)
    tl.store(counts + block, tl.sum(ones_of(bits), axis=0).to(tl.int64))


@triton.jit
def count_bits(bitmap, counts, num_words, BLOCK: tl.constexpr):
    """Write how many bits of a block of a given bitmap are set."""
    block = tl.program_id(0).to(tl.int64)
    _, bits = bits_of_block(bitmap, block, num_words, BLOCK)
    tl.store(counts + block, tl.sum(ones_of(bits), axis=0).to(tl.int64))


@triton.jit
def full(count, num_blocks, num_bytes, section_bytes, BLOCK: tl.constexpr):
    """``ZeroValue._full``: words would not shrink if all had as many values as these blocks."""
    looked_at = tl.zeros_like(count) + num_blocks * BLOCK  # as 64 bits, which the products need
    return num_bytes * (looked_at - count) <= section_bytes * looked_at


@triton.jit
def decide(
    counts, offsets, facts, num_blocks, whole, num_first, num_samples, num_bytes, section_bytes, pad,
    BLOCK: tl.constexpr, WORD_BYTES: tl.constexpr, MOST: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Decide as ``ZeroValue.pack_to`` does whether words travel raw; one program.

    Args:    facts: receives the payload's bytes and its codec's number. num_first, num_samples:
             blocks looked at first, 0 where the tensor is short. pad: words of padding behind the offsets.
    """
    i = tl.arange(0, MOST)
    first = tl.sum(tl.load(counts + i, mask=i < num_first, other=0), axis=0)
    sampled = (2 * i + 1).to(tl.int64) * whole // tl.maximum(2 * num_samples, 1)
    sample = tl.sum(tl.load(counts + sampled, mask=i < num_samples, other=0), axis=0)
    gives_up = (num_first > 0) & full(first, num_first, num_bytes, section_bytes, BLOCK)
    gives_up = gives_up & full(sample, num_samples, num_bytes, section_bytes, BLOCK)
    packed = section_bytes + tl.load(offsets + num_blocks - 1) * WORD_BYTES
    raw = gives_up | (packed >= num_bytes)
    tl.store(facts, tl.where(raw, num_bytes, packed))
    tl.store(facts + 1, tl.where(raw, 0, NUMBER))
    tl.store(offsets + num_blocks + i, tl.zeros_like(i).to(tl.int64), mask=i < pad)


@triton.jit
def decide_masked(offsets, facts, num_blocks, num_bytes, WORD_BYTES: tl.constexpr, NUMBER: tl.constexpr):
    """Payload bytes of the values at the set bits of a bitmap; all bits set is the same as raw."""
    packed = tl.load(offsets + num_blocks - 1) * WORD_BYTES
    tl.store(facts, packed)
    tl.store(facts + 1, tl.where(packed >= num_bytes, 0, NUMBER))


@triton.jit
def compact(words, bitmap, offsets, facts, values, payload, num_words, BLOCK: tl.constexpr):
    """Write the values of a block, or its words as they are if ``facts`` say raw."""
    # Last block first: the end of the words is what counting left in the cache.
    block = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    i = words_of_block(block, BLOCK)
    word = tl.load(words + i, mask=i < num_words, other=0)  # all of them: wide loads
    if tl.load(facts + 1) == 0:
        tl.store(payload + i, word, mask=i < num_words)
    else:
        _, bits = bits_of_block(bitmap, block, num_words, BLOCK)
        used, place = places(bits, BLOCK)
        tl.store(values + start_of_block(offsets, block) + place, word, mask=used)


@triton.jit
def expand(
    bitmap, offsets, values, out, error, num_values, num_words, num_blocks,
    BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Read a block back. Where bitmap, offsets and number of values disagree, read nothing and set ``error``.

    All programs that find an error store the same number: no atomics.

    Args:    EXACT: whether there are ``num_values`` values, or only room for them.
    """
    block = tl.program_id(0).to(tl.int64)
    found, bits = bits_of_block(bitmap, block, num_words, BLOCK)
    start, end = start_of_block(offsets, block), tl.load(offsets + block)
    count = tl.sum(ones_of(bits), axis=0)
    sound = (start >= 0) & (start <= end) & (end <= num_values) & (end - start == count)
    if EXACT:
        sound = sound & ((block < num_blocks - 1) | (end == num_values))
    # As on the CPU: no bit beyond the last element in its own byte; padding bytes are not looked at.
    row = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    in_use = low_bits((num_words - row * 32 + 7) // 8 * 8)
    beyond = tl.max(((found & in_use) != bits).to(tl.int32), axis=0)
    sound = sound & (beyond == 0)
    used, place = places(bits, BLOCK)
    num_read = tl.where(sound, count, 0)
    word = tl.load(values + start + place, mask=used & (place < num_read), other=0)
    i = words_of_block(block, BLOCK)
    tl.store(out + i, word, mask=i < num_words)
    tl.store(error, 1, mask=sound == 0)


@triton.jit
def checksum(bitmap, partial, num_words, num_rows, BLOCK: tl.constexpr):
    """The sum, mod 2^64, over a part of the 64-bit words of a bitmap, each mixed with its place."""
    program = tl.program_id(0).to(tl.int64)
    i = program * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(bitmap + i, mask=i < num_rows, other=0).to(tl.uint64, bitcast=True)
    num_beyond = tl.minimum(tl.maximum((i + 1) * 64 - num_words, 0), 63).to(tl.uint64)
    x = (x << num_beyond) >> num_beyond  # what stands beyond the last word's bit does not count
    x += (i + 1).to(tl.uint64) * GOLDEN
    x ^= x >> 32
    x *= MIX
    x ^= x >> 32
    x = tl.where(i < num_rows, x, tl.zeros_like(x))
    tl.store(partial + program, tl.sum(x, axis=0).to(tl.int64, bitcast=True))


# Launches. Two passes, since a scan of the blocks' counts keeps the values in order: count and write the
# bitmap, then write the values. Whether it pays is decided between them, on the device.

# Warps of a program by the bytes of a word: 16 bytes a lane, several loads in flight.
NUM_WARPS = {1: 4, 2: 4, 4: 8, 8: 8}
_NUMBER = CODEC_NAMES.index("zero_value")
_SUMMED = 4096  # 64-bit words of a bitmap for one program


def pack(
    words: Tensor, payload: Tensor, dtype: torch.dtype | None = None, *, elsewhere: Tensor | None = None
) -> Tensor:
    """Write bitmap, offsets and values; raw where ``ZeroValue`` goes raw, decided on the device.

    Args:    elsewhere: as many words, where values, or words as they are, go instead.
    """
    parts, num_words, num_bytes = sections(words.numel()), words.numel(), words.nbytes
    if parts.values >= num_bytes:
        return pack_raw(words, payload)
    grid, facts = (parts.num_blocks,), new_facts(words.device)
    launch = options(NUM_WARPS[words.element_size()], BLOCK=BLOCK)
    bitmap = payload[: parts.offsets].view(torch.int32)
    offsets = payload[parts.offsets : parts.values].view(torch.int64)
    values = payload[parts.values : num_bytes].view(words.dtype) if elsewhere is None else elsewhere
    counts = torch.empty(parts.num_blocks, dtype=torch.int64, device=words.device)
    count_words[grid](words, bitmap, counts, num_words, len(bitmap), **launch)
    torch.cumsum(counts, 0, out=offsets[: parts.num_blocks])
    whole, num_pad = num_words // BLOCK, len(offsets) - parts.num_blocks
    head = min(whole // _PART, _MOST) if whole >= _LONG else 0
    num_samples = min(head, _MOST // 2)
    sizes = (parts.num_blocks, whole, head, num_samples, num_bytes, parts.values, num_pad)
    constants = options(1, BLOCK=BLOCK, WORD_BYTES=words.element_size(), MOST=_MOST, NUMBER=_NUMBER)
    decide[(1,)](counts, offsets, facts, *sizes, **constants)
    as_they_are = payload[:num_bytes].view(words.dtype) if elsewhere is None else elsewhere
    compact[grid](words, bitmap, offsets, facts, values, as_they_are, num_words, **launch)
    return facts


def pack_masked(words: Tensor, payload: Tensor, mask: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Write the words at the set bits of ``mask``, zeros among them; all bits set is raw."""
    num_blocks, facts = sections(words.numel()).num_blocks, new_facts(words.device)
    bitmap, offsets = mask.view(torch.int32), _ends(mask, words)
    constants = options(1, WORD_BYTES=words.element_size(), NUMBER=_NUMBER)
    decide_masked[(1,)](offsets, facts, num_blocks, words.nbytes, **constants)
    facts[2:].copy_(checksum_of(mask, words.numel()))
    values = payload[: words.nbytes].view(words.dtype)
    launch = options(NUM_WARPS[words.element_size()], BLOCK=BLOCK)
    compact[(num_blocks,)](words, bitmap, offsets, facts, values, values, words.numel(), **launch)
    return facts


def unpack(
    payload: Tensor,
    out: Tensor,
    dtype: torch.dtype | None = None,
    *,
    mask: Tensor | None = None,
    elsewhere: Tensor | None = None,
    error: Tensor | None = None,
) -> Tensor:
    """Read bitmap, offsets and values, or values alone by ``mask``, whatever their bytes hold.

    Args:    elsewhere: where values are that do not stand in the payload; behind them there may be others.
             error: a flag to set instead of a new one.
    Returns: int32 on the device: not 0 if bitmap, offsets and length contradict each other.
    """
    num_words, parts = out.numel(), sections(out.numel())
    error = no_error(out.device) if error is None else error
    if mask is None:
        bitmap = payload[: parts.offsets].view(torch.int32)
        offsets, start = payload[parts.offsets : parts.values].view(torch.int64), parts.values
    else:
        bitmap, offsets, start = mask.view(torch.int32), _ends(mask, out), 0
    values = payload[start:].view(out.dtype) if elsewhere is None else elsewhere
    launch = options(NUM_WARPS[out.element_size()], BLOCK=BLOCK, EXACT=elsewhere is None)
    sizes = (len(values), num_words, parts.num_blocks)
    expand[(parts.num_blocks,)](bitmap, offsets, values, out, error, *sizes, **launch)
    return error


def checksum_of(bitmap: Tensor, num_words: int) -> Tensor:
    """``ZeroValue.bitmap_checksum`` of the bitmap of ``num_words`` words, as int64 on its device."""
    num_rows = -(-num_words // 64)
    sums = torch.zeros(max(1, -(-num_rows // _SUMMED)), dtype=torch.int64, device=bitmap.device)
    if num_rows:
        rows, constants = bitmap.view(torch.int64), options(8, BLOCK=_SUMMED)
        checksum[(len(sums),)](rows, sums, num_words, num_rows, **constants)
    total = sums.sum()
    return total + (total == 0)


def num_values(mask: Tensor, words: Tensor) -> Tensor:
    return _ends(mask, words)[-1:]


def _ends(mask: Tensor, words: Tensor) -> Tensor:
    """Count the set bits of a bitmap before the end of each block."""
    num_words, num_blocks = words.numel(), sections(words.numel()).num_blocks
    counts = torch.empty(num_blocks, dtype=torch.int64, device=mask.device)
    rows = mask.view(torch.int32)
    count_bits[(num_blocks,)](rows, counts, num_words, **options(1, BLOCK=BLOCK))
    return torch.cumsum(counts, 0)


def unpack_masked(payload: Tensor, out: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Read values alone by ``mask``; returns as ``unpack``."""
    return unpack(payload, out, mask=mask)
