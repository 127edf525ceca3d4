"""Law L2 over models, versions of the weights, tiers and optimizers, at the size of real models.

The tests hold it on small models; a full ResNet-18 keeps some 45 MB a version and takes minutes, so it is run
before a release, and a part of it at any time:

    python tests/support/product_streams.py --models resnet18 --limit 5
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence

import torch
from streams import StreamCase, differences

# Batches of 11 samples; BatchNorm needs two samples or more in every micro-batch.
MODELS = {"resnet18": 3, "resnet18_channels_last": 3, "densenet": 4, "gpt_tied": 4, "gpt_gelu_dropout": 4}
POLICIES = [
    {"weights": "latest"},
    {"weights": "stashed"},
    {"weights": "stashed", "prediction": True},
    {"weights": "vertical_sync"},
    {"weights": "double_buffered", "schedule": "1f1b"},
]
TIERS = ("device", "packed", "host", "disk")


def product(models: Sequence[str]) -> Iterator[StreamCase]:
    """Every case over ``models``, all stages in this process."""
    for model, policy, tier in itertools.product(models, POLICIES, TIERS):
        if model == "gpt_tied" and policy == {"weights": "latest"}:  # refused
            continue
        for optimizer, cuts in itertools.product(("sgd", "adam"), (2, 3)):
            yield StreamCase(
                model=model,
                cuts=cuts,
                weights_tier=tier,
                tier=tier,
                optimizer=optimizer,
                micro_batches=MODELS[model],
                steps=2,
                **policy,
            )


def main() -> int:
    """Run what the command line asks for; the exit code says whether anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--limit", type=int, help="run only so many cases")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    cases = list(product(asked.models.split(",")))
    random.Random(asked.seed).shuffle(cases)
    cases, failed, began = cases[: asked.limit], 0, time.monotonic()
    for case in cases:
        if found := differences(case):
            failed += 1
            print(f"FAILED {case!r}: {len(found)} differences, first {found[0]}", flush=True)
    print(f"{len(cases)} cases run in {time.monotonic() - began:.0f} s, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
