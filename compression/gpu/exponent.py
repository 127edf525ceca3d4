"""The exponent loops in Triton: one program per block of 4,096 words, the same bytes as the CPU's.

The plan depends on the data, so it is chosen on the device too, and what it decides, the bits of a code above
all, is a number there and no constant of a kernel. Exponents are ranked once: which level an exponent has its
code in, and which code, are comparisons of its rank. Escapes are compacted into lists, which the next launch
reads: so no thread waits for what another one stores.
"""

# Triton's compiler reads these functions; to Python their numbers are of no type.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import frame
from ..errors import CodecError
from ..exponent import _DTYPES, _LEAST_PERCENT, _RUNS, _SHORTEST
from ..frame import sections
from ..kernels import exponent_ir
from ..kernels.exponent_ir import GOLDEN as _GOLDEN
from ..names import CODEC_NAMES
from . import zero_value
from .payloads import new_facts, no_error, options, pack_raw
from .zero_value import low_bits, ones_of

BLOCK, GROUP = tl.constexpr(frame.BLOCK), tl.constexpr(exponent_ir.GROUP)
TABLE_BYTES = tl.constexpr(exponent_ir.TABLE_BYTES)
PLAN_BYTES = tl.constexpr(64)  # of a payload's first section; behind it the rank of each exponent, in a book
ROWS, LANES = tl.constexpr(frame.BLOCK // 8), tl.constexpr(8)  # a block as eights: codes of whole bytes
# Where in a state: the number of words, where in the payload they go, the codec's number, k of each level.
NUMBER, START, CODEC, BITS_OF_CODES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


@triton.jit
def up_to_groups(num):
    return (num + (GROUP - 1)) // GROUP * GROUP


@triton.jit
def escape(k):
    """The code of ``k`` bits that stands for no exponent, and how many do for one."""
    return (1 << k) - 1


@triton.jit
def plan_of(state):
    at = state + BITS_OF_CODES
    return tl.load(at).to(tl.int32), tl.load(at + 1).to(tl.int32), tl.load(at + 2).to(tl.int32)


@triton.jit
def sections_of(number, k, BITS: tl.constexpr):
    """``exponent.layout``: ends of codes and offsets, beginnings of remainders, offsets and tail."""
    padded = up_to_groups(number)
    codes_end = PLAN_BYTES + padded * k // 8
    remainders = up_to_groups(codes_end)
    offsets = remainders + padded * (BITS // 8 - 1)
    offsets_end = offsets + 8 * ((number + (BLOCK - 1)) // BLOCK)
    return codes_end, remainders, offsets, offsets_end, up_to_groups(offsets_end)


@triton.jit
def tail_bytes(n1, n2, n3, k2, k3):
    """The length of a block's tail, by the escapes of each level."""
    return 8 + up_to_groups(n1) * k2 // 8 + up_to_groups(n2) * k3 // 8 + n3


@triton.jit
def eights():
    """Places of a block's words, codes or escapes in it: [512, 8]."""
    return tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def words_of_block(number, at):
    """Count those of ``number`` words in the block that begins ``at`` one of them, in 32 bits."""
    return tl.minimum(tl.maximum(number - at, 0), BLOCK).to(tl.int32)


@triton.jit
def turned(word, BITS: tl.constexpr):
    """Words turned left by a bit, in 32 bits: the exponent is the highest byte."""
    if BITS == 16:
        x = word.to(tl.uint16, bitcast=True).to(tl.uint32)
        x = ((x << 1) | (x >> 15)) & 0xFFFF
    else:
        x = word.to(tl.uint32, bitcast=True)
        x = (x << 1) | (x >> 31)
    return x


@triton.jit
def places_of(used):
    """Count a block's ``used`` before each, and all of them."""
    lane = tl.arange(0, LANES)
    bits = tl.sum(used.to(tl.uint32) << lane[None, :].to(tl.uint32), axis=1).to(tl.uint32)
    ones = ones_of(bits)
    before = tl.cumsum(ones, axis=0) - ones
    place = before[:, None] + ones_of(bits[:, None] & low_bits(lane)[None, :])
    return place, tl.sum(ones, axis=0)


@triton.jit
def ranks_of(words, book, number, BITS: tl.constexpr):
    """The words of this program's block, turned, and the ranks of their exponents; 0 for what is padding."""
    at, j = tl.program_id(0).to(tl.int64) * BLOCK, eights()
    inside = j < words_of_block(number, at)
    x = turned(tl.load(words + at + j, mask=inside, other=0), BITS)
    rank = tl.load(book + PLAN_BYTES + (x >> (BITS - 8)), mask=inside, other=0).to(tl.int32)
    return x, rank


@triton.jit
def store_codes(to, codes, k, num_codes):
    """Write a block's codes of ``k`` bits; ``num_codes``, a multiple of 8, says how many there are."""
    shift = (tl.arange(0, LANES)[None, :] * k).to(tl.uint32)
    # The codes of eight are disjoint bits, so their sum is their union.
    eight = tl.sum(codes.to(tl.uint32) << shift, axis=1).to(tl.uint32)
    row, place = tl.arange(0, ROWS)[:, None], tl.arange(0, 4)[None, :]
    found = ((eight[:, None] >> (8 * place).to(tl.uint32)) & 255).to(tl.uint8)
    tl.store(to + row * k + place, found, mask=(row * LANES < num_codes) & (place < k))


@triton.jit
def load_codes(payload, at, k, num_codes):
    """Undo ``store_codes``, from byte ``at``, and read no other byte; 0 for what is none."""
    j = eights()
    bit = j * k
    shift, start, inside = bit % 8, payload + at + bit // 8, j < num_codes
    low = tl.load(start, mask=inside, other=0).to(tl.int32)
    high = tl.load(start + 1, mask=inside & (shift + k > 8), other=0).to(tl.int32)
    return ((low | (high << 8)) >> shift) & escape(k)


@triton.jit
def list_escapes(words, state, book, codes2, codes3, heads, lengths, BITS: tl.constexpr):
    """Write the codes of a block's escapes, level 2 and 3, each to its list, and the length of the tail."""
    block = tl.program_id(0).to(tl.int64)
    k1, k2, k3 = plan_of(state)
    number = tl.where(k1 == 0, 0, tl.load(state + NUMBER))
    _, rank = ranks_of(words, book, number, BITS)
    second = tl.where(k1 == 0, -1, rank - escape(k1))  # nothing escapes where no plan pays
    third = second - escape(k2)
    place2, n1 = places_of(second >= 0)
    place3, n2 = places_of(third >= 0)
    n3 = tl.sum(tl.sum((third >= escape(k3)).to(tl.int32), axis=1), axis=0)
    at = block * BLOCK
    tl.store(codes2 + at + place2, tl.minimum(second, escape(k2)).to(tl.uint8), mask=second >= 0)
    tl.store(codes3 + at + place3, tl.minimum(third, escape(k3)).to(tl.uint8), mask=third >= 0)
    tl.store(heads + block, n1 | (n2.to(tl.int64) << 16) | (n3.to(tl.int64) << 32))
    tl.store(lengths + block, tl.where(at < number, tail_bytes(n1, n2, n3, k2, k3), 0))


@triton.jit
def write_words(
    words, state, book, codes2, codes3, heads, ends, facts, payload, as_they_are, BITS: tl.constexpr
):  # fmt: skip
    """Write all of a block, or its words as they are where they would not be shorter; the first also facts.

    Args:    ends: where the tail of each block ends. payload, as_they_are: one memory, as bytes and as words.
    """
    block = tl.program_id(0).to(tl.int64)
    number, begin, k1 = tl.load(state + NUMBER), tl.load(state + START), tl.load(state + BITS_OF_CODES)
    num_blocks, num_bytes = (number + (BLOCK - 1)) // BLOCK, number * (BITS // 8)
    _, _, _, _, tail = sections_of(number, k1, BITS)
    packed = tail + tl.load(ends + num_blocks - 1, mask=num_blocks > 0, other=0)
    raw = (k1 == 0) | (packed >= num_bytes)
    if block == 0:
        tl.store(facts, begin + tl.where(raw, num_bytes, packed))
        tl.store(facts + 1, tl.load(state + CODEC), mask=raw == 0)
    at, j = block * BLOCK, eights()
    if raw:
        inside = j < words_of_block(number, at)
        word = tl.load(words + at + j, mask=inside, other=0)
        tl.store(as_they_are + begin // (BITS // 8) + at + j, word, mask=inside)
    elif block < num_blocks:
        if block == 0:
            write_plan(payload + begin, state, book, BITS)
        write_block(words, state, book, payload + begin, ends, BITS)
        write_tail(state, codes2 + at, codes3 + at, tl.load(heads + block), payload + begin, ends, BITS)


@triton.jit
def write_plan(payload, state, book, BITS: tl.constexpr):
    """The plan and the zeros between sections."""
    j = tl.arange(0, GROUP)
    number, k1 = tl.load(state + NUMBER), tl.load(state + BITS_OF_CODES)
    codes_end, remainders, _, offsets_end, tail = sections_of(number, k1, BITS)
    tl.store(payload + j, tl.load(book + j))
    zeros = tl.zeros([GROUP], tl.uint8)
    tl.store(payload + codes_end + j, zeros, mask=codes_end + j < remainders)
    tl.store(payload + offsets_end + j, zeros, mask=offsets_end + j < tail)


@triton.jit
def write_block(words, state, book, payload, ends, BITS: tl.constexpr):
    """A block's codes of level 1, its remainders, where its tail ends, and the plain escapes in that."""
    block = tl.program_id(0).to(tl.int64)
    number = tl.load(state + NUMBER)
    k1, k2, k3 = plan_of(state)
    _, remainders, offsets, _, tail = sections_of(number, k1, BITS)
    x, rank = ranks_of(words, book, number, BITS)
    at = block * BLOCK
    here = words_of_block(up_to_groups(number), at)
    store_codes(payload + PLAN_BYTES + at * k1 // 8, tl.minimum(rank, escape(k1)), k1, here)
    j = eights()
    group = payload + remainders + at * (BITS // 8 - 1) + j // GROUP * (GROUP * (BITS // 8 - 1))
    lane, upper = j % GROUP, (x >> (BITS - 16)) & 255
    if BITS == 32:
        low = (group + 2 * lane).to(tl.pointer_type(tl.uint16))
        tl.store(low, x.to(tl.uint16), mask=j < here)
        group += 2 * GROUP
    tl.store(group + lane, upper.to(tl.uint8), mask=j < here)
    end = tl.load(ends + block)
    tl.store((payload + offsets).to(tl.pointer_type(tl.int64)) + block, end)
    plain = rank >= escape(k1) + escape(k2) + escape(k3)
    place, n3 = places_of(plain)
    tl.store(payload + tail + end - n3 + place, (x >> (BITS - 8)).to(tl.uint8), mask=plain)


@triton.jit
def write_tail(state, codes2, codes3, head, payload, ends, BITS: tl.constexpr):
    """The numbers of escapes of a block, and their codes; ``codes2`` and ``codes3`` are its own lists."""
    block, j = tl.program_id(0).to(tl.int64), eights()
    k1, k2, k3 = plan_of(state)
    _, _, _, _, tail = sections_of(tl.load(state + NUMBER), k1, BITS)
    to = payload + tail + tl.load(ends + block - 1, mask=block > 0, other=0)
    byte = tl.arange(0, 8)
    tl.store(to + byte, ((head >> (8 * byte)) & 255).to(tl.uint8))
    n1, n2 = (head & 65535).to(tl.int32), ((head >> 16) & 65535).to(tl.int32)
    second = tl.load(codes2 + j, mask=j < n1, other=0)
    store_codes(to + 8, second, k2, up_to_groups(n1))
    third = tl.load(codes3 + j, mask=j < n2, other=0)
    store_codes(to + 8 + up_to_groups(n1) * k2 // 8, third, k3, up_to_groups(n2))


GOLDEN = tl.constexpr(_GOLDEN)
PLANS, NUM_PLANS = tl.constexpr(exponent_ir.PLANS), tl.constexpr(len(exponent_ir.PLANS))


@triton.jit
def count_exponents(words, number, BITS: tl.constexpr, RUNS: tl.constexpr):
    """Count each exponent in runs of 64 words, which begin where the CPU's do."""
    run, lane = tl.arange(0, RUNS), tl.arange(0, GROUP)
    places = (number - (GROUP - 1)).to(tl.uint64)
    first = tl.umulhi(run.to(tl.uint64) * GOLDEN, tl.zeros([RUNS], tl.uint64) + places).to(tl.int64)
    inside = (run < number // GROUP)[:, None] & (lane >= 0)[None, :]
    x = turned(tl.load(words + first[:, None] + lane[None, :], mask=inside, other=0), BITS)
    found = tl.histogram(tl.reshape((x >> (BITS - 8)).to(tl.int32), [RUNS * GROUP]), 256)
    num_none = tl.maximum(RUNS - number // GROUP, 0) * GROUP  # zeros that stand for no word
    return found - tl.where(tl.arange(0, 256) == 0, num_none.to(tl.int32), 0)


@triton.jit
def best_plan(counts, rank, BITS: tl.constexpr, PERCENT: tl.constexpr):
    """``exponent.plan_section``: the bits of codes that make the exponents counted shortest; 0: none pays."""
    total = tl.sum(counts, axis=0)
    least, k1, k2, k3 = total * 0 + (1 << 30), total * 0, total * 0, total * 0
    for p in tl.static_range(NUM_PLANS):
        left, cost, known = total, total * 0, 0
        for level in tl.static_range(3):
            cost += PLANS[p][level] * left
            known += (1 << PLANS[p][level]) - 1
            left = tl.sum(tl.where(rank >= known, counts, 0), axis=0)
        cost += 8 * left
        better = cost < least
        least = tl.where(better, cost, least)
        k1 = tl.where(better, PLANS[p][0], k1)
        k2 = tl.where(better, PLANS[p][1], k2)
        k3 = tl.where(better, PLANS[p][2], k3)
    pays = (100 * total * BITS >= PERCENT * (total * (BITS - 8) + least)).to(tl.int32)
    return k1 * pays, k2 * pays, k3 * pays


@triton.jit
def choose_plan(
    words, facts, state, book, num_words, head, alone, both,
    BITS: tl.constexpr, RUNS: tl.constexpr, SHORTEST: tl.constexpr, PERCENT: tl.constexpr,
):  # fmt: skip
    """Write how ``words`` are packed to ``state`` and ``book``; one program.

    Args:    facts: of zero_value, if it left values behind the ``head`` bytes of its sections; else number 0.
             alone, both: the number of the codec without and with zero_value before it.
    """
    apart = tl.load(facts + 1) != 0
    number = tl.where(apart, (tl.load(facts) - head) // (BITS // 8), num_words)
    counts = count_exponents(words, number, BITS, RUNS)
    e = tl.arange(0, 256)
    mine, other = counts[:, None], counts[None, :]
    ahead = (other > mine) | ((other == mine) & (e[None, :] < e[:, None]))
    rank = tl.sum(ahead.to(tl.int32), axis=1)
    k1, k2, k3 = best_plan(counts, rank, BITS, PERCENT)
    k1 = tl.where(number >= SHORTEST, k1, 0)
    tl.store(book + PLAN_BYTES + e, rank.to(tl.uint8))
    j = tl.arange(0, PLAN_BYTES)
    level, code = j // TABLE_BYTES - 1, j % TABLE_BYTES
    k = tl.where(level == 0, k1, tl.where(level == 1, k2, k3))
    before = tl.where(level == 0, 0, tl.where(level == 1, escape(k1), escape(k1) + escape(k2)))
    wanted = tl.where((level >= 0) & (code < escape(k)), before + code, -1)
    entry = tl.sum(tl.where(rank[None, :] == wanted[:, None], e[None, :], 0), axis=1)
    entry = tl.where(j == 0, k1, tl.where(j == 1, k2, tl.where(j == 2, k3, entry)))
    tl.store(book + j, entry.to(tl.uint8))
    tl.store(state + NUMBER, number)
    tl.store(state + START, tl.where(apart, head, 0))
    tl.store(state + CODEC, tl.where(apart, both, alone))
    tl.store(state + BITS_OF_CODES, k1)
    tl.store(state + BITS_OF_CODES + 1, k2)
    tl.store(state + BITS_OF_CODES + 2, k3)


@triton.jit
def read_plan(payload, num_bytes):
    """The bits of a code of each level, and whether that is a plan; bits of 1 if it is none."""
    there, known = num_bytes >= PLAN_BYTES, num_bytes < 0
    k1 = tl.load(payload, mask=there, other=0).to(tl.int32)
    k2 = tl.load(payload + 1, mask=there, other=0).to(tl.int32)
    k3 = tl.load(payload + 2, mask=there, other=0).to(tl.int32)
    for p in tl.static_range(NUM_PLANS):
        known = known | ((k1 == PLANS[p][0]) & (k2 == PLANS[p][1]) & (k3 == PLANS[p][2]))
    return tl.where(known, k1, 1), tl.where(known, k2, 1), tl.where(known, k3, 1), known


@triton.jit
def read_head(at, sound):
    """The numbers of escapes of a block, from the 8 bytes of its head."""
    byte = tl.arange(0, 8)
    found = tl.load(at + byte, mask=byte < tl.where(sound, 8, 0), other=0).to(tl.uint64)
    head = tl.sum(found << (8 * byte).to(tl.uint64), axis=0).to(tl.int64)
    return head & 0xFFFF, (head >> 16) & 0xFFFF, (head >> 32) & 0xFFFFFFFF


@triton.jit
def open_block(payload, numbers, num_bytes, room, BITS: tl.constexpr):
    """Read the numbers of this program's block.

    Args:    numbers: holds the number of words, at most ``room``.
    Returns: whether it is sound; codes of level 1; escapes of levels 1, 2 and 3; where its tail begins. All
             numbers are 0 where it is not sound, or the block is behind the last one.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK
    k1, k2, k3, known = read_plan(payload, num_bytes)
    number = tl.load(numbers)
    possible = known & (number > 0) & (number <= room)
    number = tl.where(possible, number, 0)
    _, _, offsets, _, tail = sections_of(number, k1, BITS)
    possible = possible & (num_bytes < number * (BITS // 8)) & (tail <= num_bytes)
    inside = possible & (at < number)
    ends = (payload + offsets).to(tl.pointer_type(tl.int64)) + at // BLOCK
    begin = tl.load(ends - 1, mask=inside & (at > 0), other=0)
    end = tl.load(ends, mask=inside, other=0)
    sound = inside & (begin >= 0) & (begin <= end) & (end <= num_bytes - tail) & (end - begin >= 8)
    sound = sound & ((at + BLOCK < number) | (end == num_bytes - tail))
    n1, n2, n3 = read_head(payload + tail + begin, sound)
    num = words_of_block(up_to_groups(number), at)
    sound = sound & (n1 <= num) & (n2 <= n1) & (n3 <= n2) & (tail_bytes(n1, n2, n3, k2, k3) == end - begin)
    all_right = possible & (sound | (at >= number))
    num, n1 = tl.where(sound, num, 0), tl.where(sound, n1, 0).to(tl.int32)
    n2, n3 = tl.where(sound, n2, 0).to(tl.int32), tl.where(sound, n3, 0).to(tl.int32)
    return all_right, num, n1, n2, n3, tail + begin


@triton.jit
def restored(payload, at, table, k, num_codes, escapes, num_escapes):
    """Codes from byte ``at`` on to exponents, escapes among them from ``escapes``; and how many those are.

    Args:    table: the byte where the exponents of the codes begin.
    """
    code, j = load_codes(payload, at, k, num_codes), eights()
    used = (code == escape(k)) & (j < num_codes)
    place, found = places_of(used)
    known = tl.load(payload + table + code, mask=(code < escape(k)) & (j < num_codes), other=0)
    return tl.where(used, tl.load(escapes + place, mask=used & (place < num_escapes), other=0), known), found


@triton.jit
def restore_escapes(
    payload, numbers, escapes, out, error, num_bytes, room, BITS: tl.constexpr, LEVEL: tl.constexpr
):  # fmt: skip
    """Write the exponents of level 3 to ``out``, or those of level 2, whose ``escapes`` they are."""
    at = tl.program_id(0).to(tl.int64) * BLOCK
    all_right, _, n1, n2, n3, tail = open_block(payload, numbers, num_bytes, room, BITS)
    _, k2, k3, _ = read_plan(payload, num_bytes)
    second = tail + 8
    third = second + up_to_groups(n1) * k2 // 8
    if LEVEL == 3:
        plain, num = payload + third + up_to_groups(n2) * k3 // 8, n2
        table = PLAN_BYTES - TABLE_BYTES
        exponent, found = restored(payload, third, table, k3, up_to_groups(n2), plain, n3)
        tl.store(error, 1, mask=(all_right == 0) | (found != n3))
    else:
        table, num = PLAN_BYTES - 2 * TABLE_BYTES, n1
        exponent, found = restored(payload, second, table, k2, up_to_groups(n1), escapes + at, n2)
        tl.store(error, 1, mask=(all_right == 0) | (found != n2))
    j = eights()
    tl.store(out + at + j, exponent, mask=j < num)


@triton.jit
def restore_words(payload, numbers, escapes, out, error, num_bytes, room, BITS: tl.constexpr):
    """Write the words of a block; ``escapes`` are the exponents of level 2."""
    at, j = tl.program_id(0).to(tl.int64) * BLOCK, eights()
    all_right, num, n1, _, _, _ = open_block(payload, numbers, num_bytes, room, BITS)
    k1, _, _, _ = read_plan(payload, num_bytes)
    codes, table = PLAN_BYTES + at * k1 // 8, PLAN_BYTES - 3 * TABLE_BYTES
    exponent, found = restored(payload, codes, table, k1, num, escapes + at, n1)
    tl.store(error, 1, mask=(all_right == 0) | (found != n1))
    number = tl.where(all_right, tl.load(numbers), 0)
    _, remainders, _, _, _ = sections_of(number, k1, BITS)
    group = payload + remainders + at * (BITS // 8 - 1) + j // GROUP * (GROUP * (BITS // 8 - 1))
    lane, x = j % GROUP, exponent.to(tl.uint32) << (BITS - 8)
    if BITS == 32:
        low = (group + 2 * lane).to(tl.pointer_type(tl.uint16))
        x |= tl.load(low, mask=j < num, other=0).to(tl.uint32)
        group += 2 * GROUP
    x |= tl.load(group + lane, mask=j < num, other=0).to(tl.uint32) << (BITS - 16)
    x = (x >> 1) | (x << (BITS - 1))
    if BITS == 16:
        word = x.to(tl.uint16).to(tl.int16, bitcast=True)
    else:
        word = x.to(tl.int32, bitcast=True)
    tl.store(out + at + j, word, mask=j < tl.minimum(num, words_of_block(number, at)))


# Launches. How many values there are, which plan suits them and whether it pays is known on the device alone:
# launches are for the most there may be, kernels read what there is, and nothing waits.

_ALONE, _BOTH = CODEC_NAMES.index("exponent"), CODEC_NAMES.index("zero_value+exponent")
_WARPS = 16  # of a program for a block; with 8 a thread needs twice the registers
_STATE, _BOOK = 8, 40  # u64: numbers that kernels leave each other; a plan section, the rank of each exponent


def pack(words: Tensor, payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Write words as ``Exponent`` does; raw where it goes raw, decided on the device."""
    if not _suits(words, dtype):
        return pack_raw(words, payload)
    return _pack(words, payload, new_facts(words.device), head=0, alone=_ALONE)


def pack_combined(words: Tensor, payload: Tensor, dtype: torch.dtype) -> Tensor:
    """Write bitmap, offsets and packed values; one codec alone where ``Combined`` takes one alone."""
    head = sections(words.numel()).values
    if head >= words.nbytes:
        return pack(words, payload, dtype)
    if not _suits(words, dtype):
        return zero_value.pack(words, payload)
    values = torch.empty_like(words)
    facts = zero_value.pack(words, payload, elsewhere=values)
    return _pack(values, payload, facts, head=head, alone=_ALONE)


def pack_masked(words: Tensor, payload: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Write the words at the set bits of ``mask``, packed where that is shorter."""
    if not _suits(words, dtype):
        return zero_value.pack_masked(words, payload, mask)
    values = torch.empty_like(words)
    facts = zero_value.pack_masked(words, values.view(torch.uint8), mask)
    return _pack(values, payload, facts, head=0, alone=_BOTH)


def unpack(payload: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo ``pack``, whatever the bytes hold.

    Returns: int32 on the device: not 0 if plan, codes, offsets, tail and length contradict each other.
    Raises:  CodecError: no such payload has this dtype.
    """
    number = torch.full((1,), out.numel(), dtype=torch.int64, device=out.device)
    return _unpack(payload, number, out, dtype)


def unpack_combined(payload: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo ``pack_combined``; returns and errors as ``unpack``."""
    parts, values = sections(out.numel()), torch.empty_like(out)
    ends = payload[parts.offsets : parts.values].view(torch.int64)
    error = _unpack(payload[parts.values :], ends[parts.num_blocks - 1 :], values, dtype)
    return zero_value.unpack(payload, out, elsewhere=values, error=error)


def unpack_masked(payload: Tensor, out: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo ``pack_masked``; returns and errors as ``unpack``."""
    values = torch.empty_like(out)
    error = _unpack(payload, zero_value.num_values(mask, out), values, dtype)
    return zero_value.unpack(payload, out, mask=mask, elsewhere=values, error=error)


def _suits(words: Tensor, dtype: torch.dtype) -> bool:
    return dtype in _DTYPES and words.numel() >= _SHORTEST


def _pack(words: Tensor, payload: Tensor, facts: Tensor, *, head: int, alone: int) -> Tensor:
    """Pack ``words``, or so many of them as the ``facts`` of zero_value say, and bring those up to date.

    Args:    payload: at its start for all words, behind ``head`` bytes for values.
             alone: the codec's number where zero_value left nothing out.
    """
    device = words.device
    num_words, num_bytes, bits = words.numel(), words.nbytes, 8 * words.element_size()
    num_blocks = -(-num_words // frame.BLOCK)
    state, book = torch.empty(_STATE + _BOOK, dtype=torch.int64, device=device).split([_STATE, _BOOK])
    codes2, codes3 = torch.empty((2, num_blocks * frame.BLOCK), dtype=torch.uint8, device=device)
    heads, lengths = torch.empty((2, num_blocks), dtype=torch.int64, device=device)
    book, numbers = book.view(torch.uint8), (num_words, head, alone, _BOTH)
    rules = options(16, BITS=bits, RUNS=_RUNS, SHORTEST=_SHORTEST, PERCENT=_LEAST_PERCENT)
    choose_plan[(1,)](words, facts, state, book, *numbers, **rules)
    made, grid = (words, state, book, codes2, codes3, heads), (num_blocks,)
    launch = options(_WARPS, BITS=bits)
    list_escapes[grid](*made, lengths, **launch)
    ends, as_they_are = torch.cumsum(lengths, 0), payload[:num_bytes].view(words.dtype)
    write_words[grid](*made, ends, facts, payload, as_they_are, **launch)
    return facts


def _unpack(payload: Tensor, number: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """Read ``number`` words, counted on the device, to the beginning of ``out``, level by level."""
    bits, num_blocks = 8 * out.element_size(), -(-out.numel() // frame.BLOCK)
    if _DTYPES.get(dtype) != bits:
        raise CodecError(f"an exponent frame has floats of 32 or 16 bits, found {dtype}; it was damaged")
    error = no_error(out.device)
    second, first = torch.empty((2, num_blocks * frame.BLOCK), dtype=torch.uint8, device=out.device)
    sizes, grid, launch = (payload.numel(), out.numel()), (num_blocks,), options(_WARPS, BITS=bits)
    restore_escapes[grid](payload, number, payload, second, error, *sizes, LEVEL=3, **launch)
    restore_escapes[grid](payload, number, second, first, error, *sizes, LEVEL=2, **launch)
    restore_words[grid](payload, number, first, out, error, *sizes, **launch)
    return error
