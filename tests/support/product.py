"""The laws' factors, what of them goes together, and their product: every pair once, or at random.

A case that failed is run again by its own line, which names everything and no seed:

    python tests/support/product.py "Case(model='mlp', cuts=2, schedule='zb_h1', tier='packed')"
"""

import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import law
import streams
import torch
from cases import SCHEDULERS, Case
from ranks import Ranks
from streams import StreamCase
from zoo import DAGS

Unsuited = Callable[[dict[str, Any]], str]

PARTS = ("*",)  # the modules of a model, one by one
TWO_A_RANK = ("interleaved", "zbv", "dualpipev")
LATE = ("late", "late processes", "direct")
"""On a device that does everything late; ``direct``: between ranks as over NCCL."""

NORMED = ("residual", "residual_channels_last", "dag")
"""Models with batch norms: their statistics forbid a second forward on replicas."""

FACTORS: dict[str, tuple] = {
    "model": ("mlp", "penalized", "tied", "gated", "padded", "residual", "dag", "gpt_tied"),
    "codec": ("raw", "zero_value", "exponent", "byte_plane", "auto"),
    "schedule": ("gpipe", "1f1b", "zb_h1", *TWO_A_RANK),
    "cuts": (1, 2, 3, 4, "every", "random"),
    "tier": ("device", "packed", "host", "disk"),
    "parameters_tier": ("device", "packed", "host", "disk", "far"),
    "world": ("alone", "threads", "processes", *LATE),
    "micro_batches": (1, 2, 3, 5),
    "replicas": (1, 2, 3, (2, 1)),
    "shares": ("even", "uneven"),
    "optimizer": ("sgd", "plain", "nesterov", "adam", "no_biases", "adamw", "fused"),
    "scaler": (None, (2.0**14, 2), (2.0**120, 2), 1024.0),
    "dtype": (None, torch.float64, torch.bfloat16),
    "resume": ("", "same", "other", "state"),
    "near": (0, 1, 4),
    "extra_in_flight": (0, 1, "auto"),
    "autocast": (None, torch.bfloat16),
    "clip": (1.0, 0.05, None),
    "least_mirrored": (1, 1000),
    "budget": (None, "least"),
    "recompute": (False, True, PARTS),
    "weights_first": (False, True),
    "scheduler": (False, True, "another"),
    "detect_anomaly": (False, True),
    "sharded": (False, True),
    "owner": ("spread", "first"),
    "splits": (False, True),
    "evaluates": (False, True),
    "bare": (False, True),
}  # fmt: skip
"""Synchronous training: the values of every factor, the cheapest first. All batches have 11 samples."""


def unsuited(row: dict[str, Any]) -> str:
    """Why values do not go together, "" if they do; some factors may be missing in ``row``."""

    def has(factor: str, *values: Any) -> bool:
        return factor in row and row[factor] in values

    def lacks(factor: str, *values: Any) -> bool:
        return factor in row and row[factor] not in values

    replicated = lacks("replicas", 1)
    rules = {
        "two stages a rank": has("schedule", *TWO_A_RANK) and lacks("cuts", 2, 4, "random"),
        "its order is fixed": has("extra_in_flight", 1) and lacks("schedule", "1f1b", "zb_h1"),
        "a forward that runs again keeps nothing": lacks("recompute", False) and lacks("tier", "device"),
        "parts leave parameters on the device": has("recompute", PARTS)
        and lacks("parameters_tier", "device"),
        "a checkpoint has no gradients": lacks("resume", "") and has("optimizer", "no_biases"),
        "the state of all threads is on the first": has("resume", "state") and has("world", "threads"),
        "what no state_dict has": has("resume", "state") and has("model", "Unsaved"),
        "shapes have no autocast": has("bare", True) and lacks("autocast", None),
        "shapes have no values": has("bare", True) and has("model", "padded"),
        "every layer is many": has("cuts", "every") and has("model", *NORMED, "gpt_tied"),
        "a rank for itself": has("cuts", 1) and has("replicas", 1) and lacks("world", "alone", "late"),
        "one rank for two": has("schedule", *TWO_A_RANK)
        and has("cuts", 2)
        and has("replicas", 1)
        and lacks("world", "alone", "late"),
        "a cast of what is cast": lacks("dtype", None) and lacks("autocast", None),
        "a budget chooses tiers": lacks("budget", None)
        and (lacks("tier", "device") or lacks("parameters_tier", "device") or lacks("recompute", False)),
        "a late device is no GPU with a mirror": has("world", *LATE)
        and (lacks("parameters_tier", "device") or lacks("budget", None)),
        "four ranks have replicas": replicated
        and (
            lacks("cuts", 1, 2, 4)
            or (has("cuts", 4) and (lacks("schedule", *TWO_A_RANK) or lacks("replicas", 2)))
        ),
        "each replica has a micro-batch": row.get("micro_batches", 5)
        < {1: 1, 2: 2, 3: 3, (2, 1): 2}[row.get("replicas", 1)],
        "replicas by stage": has("replicas", (2, 1)) and (lacks("cuts", 2) or has("schedule", *TWO_A_RANK)),
        "four ranks at most": has("replicas", 3) and lacks("cuts", 1),
        "a gradient inside a forward does not run again": has("model", "Differentiated")
        and (lacks("recompute", False) or has("budget", "least")),
        "a frozen weight that forwards write to is one for all, once a forward": has("model", "Teacher")
        and (replicated or lacks("recompute", False) or has("budget", "least")),
        "a guard refuses what is infinite": has("detect_anomaly", True)
        and has("model", "InfiniteAtZero", "WrittenUnseen"),
        "no second forward of batch norms": replicated
        and lacks("recompute", False)
        and has("model", *NORMED),
        "for replicas": has("replicas", 1)
        and (has("shares", "uneven") or has("sharded", True) or has("owner", "first") or has("splits", True)),
        "an owner updates for all": has("owner", "first")
        and has("sharded", False)
        and has("parameters_tier", "device"),
        "each parameter has an optimizer": replicated
        and (has("sharded", True) or lacks("parameters_tier", "device") or lacks("budget", None))
        and has("optimizer", "no_biases"),
        "split inputs are those of ranks": has("splits", True) and has("world", "alone"),
    }
    return next((rule for rule, broken in rules.items() if broken), "")


def _draw(row: dict[str, Any], seed: int) -> None:
    """Draw what a value leaves open: which graph, which cuts, which schedule of the learning rate."""
    if row["model"] == "dag":
        row["model"] = DAGS[seed % len(DAGS)]
    if row["cuts"] == "random":
        row["cuts"] = ("random", 4, seed % 1000)
    if row["scheduler"] == "another":
        row["scheduler"] = [*SCHEDULERS][1 + seed % (len(SCHEDULERS) - 1)]


def case_of(row: dict[str, Any], seed: int) -> Case:
    """The case of a full row."""
    row = dict(row)
    _draw(row, seed)
    stages, replicas = row["cuts"], row["replicas"]
    several = row["world"] not in ("alone", "late")
    if row["schedule"] in TWO_A_RANK:
        row["ranks"] = 2 if stages != 2 else 1
    elif several and stages not in (1, 2):
        row["ranks"] = 2
    if row["budget"]:
        row |= {"tier": "auto", "parameters_tier": "auto"}
    if row["parameters_tier"] == "far":
        row |= {"parameters_tier": "packed", "far": True}
    if replicas != 1:
        ranks = sum(replicas) if isinstance(replicas, tuple) else replicas * stages
        if row["schedule"] in TWO_A_RANK:
            ranks = row["ranks"] = ranks // 2
        shares = [3, 1, 1, 2, 1, 1][:ranks] if row.pop("shares") == "uneven" else ()
        row |= {"exact": True, "shares": tuple(shares)}
        row["replicas"] = list(replicas) if isinstance(replicas, tuple) else replicas
    else:
        del row["shares"]
    if row["world"] in LATE:
        row |= {"late": (0, 1, 2, 3) if several else (0,), "direct": row["world"] == "direct"}
        row["world"] = "processes" if several else "alone"
    return Case(**row, steps=3 if isinstance(row["scaler"], tuple) else 2)


STREAMS: dict[str, tuple] = {
    "model": ("mlp", "penalized", "tied", "padded", "residual", "dag", "gpt_tied"),
    "codec": ("raw", "zero_value", "auto"),
    "policy": (
        "latest",
        "stashed",
        "vertical_sync",
        "double_buffered",
        "latest ahead",
        "stashed ahead",
        "double_buffered feedback",
    ),
    "cuts": (1, 2, 4, "every", "random"),
    "optimizer": ("sgd", "plain", "nesterov", "adam", "adamw"),
    "micro_batches": (1, 2, 4, 5),
    "tier": FACTORS["tier"],
    "weights_tier": FACTORS["tier"],
    "parameters_tier": ("device", "packed", "host", "disk"),
    "clip": (None, 0.5),
    "world": ("alone", "processes"),
    "recompute": (False, True, PARTS),
    "weights_first": (False, True),
    "budget": (None, "least"),
    "scheduler": (False, True),
    "resume": ("", "same", "state"),
    "bare": (False, True),
}
"""Asynchronous training; "ahead": with the weights that are predicted for the backward; "feedback": of the
errors of updates."""

SHARED = ("tied", "gpt_tied", "dag", "penalized")
"""Models of which several stages read one parameter."""


def unsuited_streams(row: dict[str, Any]) -> str:
    """The same as ``unsuited`` for asynchronous training."""
    policy, ahead = row.get("policy", ""), str(row.get("policy")).endswith("ahead")
    rules = {
        "every stage has a micro-batch": policy.startswith("double_buffered")
        and row.get("micro_batches", 5)
        < {"every": 99, "random": 4}.get(row.get("cuts", 1), row.get("cuts", 1)),
        "the newest weights are those of one stage": policy.startswith("latest")
        and row.get("model") in SHARED,
        "a second forward sees the same weights": row.get("recompute")
        and (ahead or policy == "latest" or row.get("tier", "device") != "device"),
        "parts leave parameters on the device": row.get("recompute") == PARTS
        and row.get("parameters_tier", "device") != "device",
        "all weights are there": (ahead or policy.endswith("feedback"))
        and row.get("parameters_tier", "device") != "device",
        "a budget chooses tiers": row.get("budget")
        and (row.get("tier", "device"), row.get("parameters_tier", "device")) != ("device", "device"),
        "the momentum goes on": ahead and row.get("optimizer") == "plain",
        "shapes have no values": row.get("bare") and row.get("model") == "padded",
        "every layer is many": row.get("cuts") == "every" and row.get("model") in (*NORMED, "gpt_tied"),
        "a rank for itself": row.get("cuts") == 1 and row.get("world") == "processes",
    }
    return next((rule for rule, broken in rules.items() if broken), "")


def stream_of(row: dict[str, Any], seed: int) -> StreamCase:
    """The asynchronous case of a full row."""
    weights, _, more = row["policy"].partition(" ")
    row = {name: value for name, value in row.items() if name != "policy"}
    _draw(row, seed)
    if row["cuts"] not in (1, 2) and row["world"] == "processes":
        row["ranks"] = 2
    if row["budget"]:
        row |= {"tier": "auto", "parameters_tier": "auto"}
    if weights == "double_buffered":
        row["schedule"] = "1f1b"
    asked = {"prediction": more == "ahead", "error_feedback": more == "feedback"}
    return StreamCase(**row, **asked, weights=weights, steps=3 if asked["error_feedback"] else 2)


def pairs(factors: dict[str, tuple], seed: int, unsuited: Unsuited) -> Iterator[dict[str, Any]]:
    """Rows in which every two values of two factors meet at least once, where a row can have both.

    As in AETG (Cohen et al., IEEE TSE 1997), a row begins with two values that have not met, and takes of
    each other factor the value that meets most for the first time. Libraries that were tried (allpairspy,
    covertable) leave pairs out where not all goes together."""
    chance = random.Random(seed)
    values = [(name, value) for name in factors for value in factors[name]]
    left = dict.fromkeys(  # in their order, which a set has not
        frozenset(pair)
        for pair in combinations(values, 2)
        if pair[0][0] != pair[1][0] and not unsuited(dict(pair))
    )
    while left:
        start = chance.choice(list(left))
        tries = (_filled(dict(start), factors, chance, unsuited, left) for _ in range(TRIES))
        rows = itertools.islice(filter(None, tries), CANDIDATES)
        row = max(rows, key=lambda row: len(left.keys() & pairs_of(row)), default={})  # where a third factor
        for pair in (start, *pairs_of(row)):  # keeps the two apart: none
            left.pop(pair, None)
        if row:
            yield row


def pairs_of(row: dict[str, Any]) -> set[frozenset]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


CANDIDATES = 4
"""Rows of which the one is taken that has most pairs for the first time."""

TRIES = 80
"""Rows that are begun with two values until one has the other factors, too."""

STEPS = 40
"""Values that a row tries in all, before it is given up."""


def draws(factors: dict[str, tuple], seed: int, unsuited: Unsuited) -> Iterator[dict[str, Any]]:
    """Rows at random, without end."""
    chance = random.Random(seed)
    while True:
        if row := _filled({}, factors, chance, unsuited):
            yield row


def _filled(
    row: dict[str, Any], factors: dict[str, tuple], chance: random.Random, unsuited: Unsuited, left: Any = ()
) -> dict[str, Any] | None:
    """A whole row, or None: the rest of the factors in random order, of each a value that goes with the
    others, if possible one that meets them for the first time; beside pairs that are left, else the first.
    Where a factor has none, another value of the one before is taken."""
    steps = iter(range(STEPS))

    def fill(row: dict[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
        if not names:
            return row
        name, *rest = names
        suited = [value for value in factors[name] if not unsuited({**row, name: value})]
        new = [sum(frozenset({(name, value), other}) in left for other in row.items()) for value in suited]
        if any(new) or not left:
            new = [number + chance.random() / 2 for number in new]
        for place in sorted(range(len(suited)), key=lambda place: -new[place]):
            if next(steps, None) is None:
                return None
            if found := fill({**row, name: suited[place]}, rest):
                return found
        return None

    rest = [name for name in factors if name not in row]
    found = fill(row, chance.sample(rest, len(rest)))
    return found and {name: found[name] for name in factors}


def differences(case: Case, ranks: Ranks | None = None) -> list[str]:
    """Differences of a case from the plain loop, or from the replay; and the line that runs it again."""
    found = (streams if isinstance(case, StreamCase) else law).differences(case, ranks)
    return [*found, f'again: python tests/support/product.py "{case!r}"'] if found else []


def main(lines: Sequence[str]) -> int:
    """Run the cases that are given as Python; return how many differ."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    ranks, failed = Ranks(), 0
    try:
        for line in lines:
            case = eval(line, {"Case": Case, "StreamCase": StreamCase, "torch": torch})
            found = differences(case, ranks)
            print(case, *found or ["the same bits"], sep="\n  ")
            failed += bool(found)
    finally:
        ranks.close()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
