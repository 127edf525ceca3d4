"""Exponent payloads read back in Triton, a level a launch, and nothing outside them, whatever they hold.

A program holds what its block says against what it must be, and takes it for empty where that fails.
"""

# Triton's compiler reads these functions; to Python their numbers are of no type.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from .gpu_exponent import (
    BLOCK,
    GROUP,
    PLAN_BYTES,
    TABLE_BYTES,
    eights,
    escape,
    load_codes,
    places_of,
    sections_of,
    tail_bytes,
    up_to_groups,
    words_of_block,
)
from .gpu_exponent_plan import NUM_PLANS, PLANS


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
    """What a payload says of this program's block.

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
    num, n1, n2, n3 = (
        tl.where(sound, num, 0),
        tl.where(sound, n1, 0),
        tl.where(sound, n2, 0),
        tl.where(sound, n3, 0),
    )
    return all_right, num, n1.to(tl.int32), n2.to(tl.int32), n3.to(tl.int32), tail + begin


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
