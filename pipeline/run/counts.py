"""Choice of ``ranks=auto`` and ``micro_batches=auto``: those of the shortest simulated step that fits.

Layers are measured at two sizes of a micro-batch; for others their seconds are taken in a straight line."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from ...compression.errors import ConfigError, PenstockError, PlanError
from ...compression.names import AUTO
from ...conf.schema import PlanConfig
from ...stages.profiling.network_profile import Profile
from ...stages.units import show_seconds
from ..data.samples import Samples
from ..distributed.launcher import cores
from . import build
from .alternatives import KNOWN
from .bounded import recorded_without_memory
from .determinism import place
from .early import ALL, check_chosen
from .planning import partition_options, plan_of, record
from .schedule_comparison import Candidate, candidate

MOST_MICRO_BATCHES = 64
MEASURED_AT = (4, 64)  # micro-batches; half as many where the model does not take so few samples
EQUAL = 1.02  # steps that differ by less are equals: they were measured
EACH = 8  # ranks up to which every number is tried; then powers of two


def choose(config: PlanConfig, samples: Samples | None, profile: Profile | None = None) -> str | None:
    """Write the numbers of ``config.searched`` into ``config``; return a sentence about them, None if there
    are none.

    Args:   samples: of which the model is measured; None: ``profile`` is there already.
    Raises: PenstockError: no number suits the model and the options, or fits."""
    if not config.searched:
        return None
    options, found = partition_options(config), list[tuple[PlanConfig, Candidate]]()
    refused: PenstockError | None = None
    profiles = _profiles(config, samples) if samples else _known(config, profile)
    schedule = AUTO if config.schedule == ALL else config.schedule
    for measured, micro_batches in profiles:
        for ranks in _ranks(config):
            tried = dataclasses.replace(config, ranks=ranks, micro_batches=micro_batches, schedule=schedule)
            numbers = {"ranks": ranks, "micro_batches": micro_batches}
            try:
                plan = plan_of(tried, measured, {**options, **numbers})
                one = candidate(measured, plan, **{name: options[name] for name in KNOWN})
            except PenstockError as error:
                refused = refused or error
                continue
            found += [(tried, one)] * one.fits
    if not found:
        raise refused or ConfigError(
            f"{'=auto '.join(config.searched)}=auto: nothing fits; raise memory.device="
        )
    least = min(one.seconds for _, one in found)
    equals = [pair for pair in found if pair[1].seconds <= least * EQUAL]
    best, one = min(equals, key=lambda pair: (pair[0].ranks, pair[0].micro_batches))
    chosen = [f"{name}={getattr(best, name)}" for name in config.searched]
    for name in config.searched:
        setattr(config, name, getattr(best, name))
    slowest = max(found, key=lambda pair: pair[1].seconds)
    worst = " ".join(f"{name}={getattr(slowest[0], name)}" for name in config.searched)
    config.searched = ()
    check_chosen(config)
    return (
        f"{' '.join(chosen)} threads={config.threads}, with a step of {show_seconds(one.seconds)}, is the "
        f"best of {len(found)} simulated; {worst} takes {show_seconds(slowest[1].seconds)}"
    )


def _ranks(config: PlanConfig) -> list[int]:
    if "ranks" not in config.searched:
        return [config.ranks]
    most = max(1, min(config.ranks, cores() // (config.threads or 1)))
    most = torch.accelerator.device_count() if place(config).is_gpu else most
    return [n for n in range(1, most + 1) if n <= EACH or n == most or n.bit_count() == 1]


def _profiles(config: PlanConfig, samples: Samples) -> Iterator[tuple[Profile, int]]:
    """Yield a profile for each number of micro-batches."""
    if "micro_batches" not in config.searched:
        yield _measured(config, samples, config.micro_batches), config.micro_batches
        return
    most = min(config.batch_size, MOST_MICRO_BATCHES)
    (_, few), (least, many) = (_taken(config, samples, min(number, most)) for number in MEASURED_AT)
    for micro_batches in (2**power for power in range(min(most, least).bit_length())):
        size = -(-config.batch_size // micro_batches)
        yield few.of_samples(size, smaller=many), micro_batches


def _taken(config: PlanConfig, samples: Samples, micro_batches: int) -> tuple[int, Profile]:
    """Return so many micro-batches, or as many as the model takes, with a measurement."""
    while True:
        try:
            return micro_batches, _measured(config, samples, micro_batches)
        except PlanError:  # of a batch norm of one sample
            if micro_batches == 1:
                raise
            micro_batches //= 2


def _known(config: PlanConfig, profile: Profile | None) -> Iterator[tuple[Profile, int]]:
    if "micro_batches" in config.searched:
        raise ConfigError(
            "micro_batches=auto measures the model at two sizes, and profile= has one; drop profile=, or "
            "give a number"
        )
    assert profile is not None, "one of both is given"
    yield profile, config.micro_batches


def _measured(config: PlanConfig, samples: Samples, micro_batches: int) -> Profile:
    tried: Any = dataclasses.replace(config, micro_batches=micro_batches)
    autocast = build.autocast(getattr(config, "autocast", None))
    found = recorded_without_memory(tried, samples) or record(tried, samples, autocast=autocast)
    return found.measure(packs=config.has_links)
