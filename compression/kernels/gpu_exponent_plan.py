"""The plan of an exponent payload chosen in Triton: which exponents have codes, and of how many bits.

The counts, their order and the sums are the CPU's in integers, so that the plan is the CPU's plan.
"""

# Triton's compiler reads these functions; to Python their numbers are of no type.
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from . import exponent_isa
from .exponent_words import GOLDEN as _GOLDEN
from .gpu_exponent import BITS_OF_CODES, CODEC, GROUP, NUMBER, PLAN_BYTES, START, TABLE_BYTES, escape, turned

GOLDEN = tl.constexpr(_GOLDEN)
PLANS, NUM_PLANS = tl.constexpr(exponent_isa.PLANS), tl.constexpr(len(exponent_isa.PLANS))


@triton.jit
def count_exponents(words, number, BITS: tl.constexpr, RUNS: tl.constexpr):
    """How often each exponent stands in runs of 64 words, which begin where the CPU's do."""
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
