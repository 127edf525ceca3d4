"""Who takes part in ``penstock bench offload``, by name, and within which limits; known without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...compression.errors import ConfigError, PlanError
from ...stages.units import parse_bytes

CASES = ("disk", "packed", "placement")
KEPT, KEPT_AS_IT_COMES = "kept", "kept_as_it_comes"
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "131072", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Lets a process shrink as its tensors do: glibc else keeps what was freed between other blocks. That costs
page faults, fewer with huge pages; so what keeps everything also runs without (``kept_as_it_comes``)."""
LIMIT = "$limit"
"""Stands in a contestant's options for its budget; without a limit it does not take part."""
BUDGET = 0.7
"""The share of a limit that is a contestant's budget: the layer that runs and the allocator are beside it."""

Options = Mapping[str, Mapping[str, Any]]
CONTESTANTS: dict[str, Options] = {
    KEPT: {},
    KEPT_AS_IT_COMES: {"environment": {}},
    "disk": {"partition": {"tier": "disk"}},
    "disk_parameters": {"partition": {"tier": "disk", "parameters_tier": "disk"}},
    "auto": {"partition": {"memory": LIMIT, "tier": "auto", "parameters_tier": "auto"}},
}
"""The options of ``partition`` and of ``MemoryOptions`` (``memory``) with which each of them trains,
in another ``environment`` than ``ENVIRONMENT`` where it has one. A budget is ``"memory": LIMIT``."""

_IMAGES = ("resnet18", "vgg11_bn", "squeezenet1_1", "densenet121", "mobilenet_v3_small")
NETWORKS: dict[str, dict[str, Any]] = {
    name: {"model": {"_target_": "penstock.pipeline.models.torchvision", "name": name}} for name in _IMAGES
} | {
    "gpt": {
        "model": {"_target_": "penstock.pipeline.models.gpt", "activation": "relu2"},
        "data": {"_target_": "penstock.pipeline.samples.text.load"},
    }
}
"""The networks of the case packed: what their job has instead of the options' model and data."""

TRACES = ("resnet18", "resnet50", *_IMAGES[1:], "gpt")
"""The networks of which the case placement places a step."""


def filled(options: Options, limit: int | None) -> dict[str, dict[str, Any]] | None:
    """The options of a contestant with ``limit`` in its place; None: it cannot train without one."""
    asks = any(value == LIMIT for group in options.values() for value in group.values())
    if asks and limit is None:
        return None
    budget = None if limit is None else int(BUDGET * limit)
    return {
        name: {key: budget if value == LIMIT else value for key, value in group.items()}
        for name, group in options.items()
    }


def bytes_of(limit: Any, needed: int) -> int | None:
    """The bytes of a limit as it is typed: a size, a share of ``needed``, or None.

    Raises: ConfigError: it is none of these."""
    if limit is None:
        return None
    if share := re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)%", str(limit)):
        if not 0 < float(share[1]) <= 100:
            raise ConfigError(f"limits={limit} is a share of what is needed; write 1% to 100%")
        return max(1, int(needed * float(share[1]) / 100))
    try:
        return parse_bytes(limit, name="limits")
    except PlanError as error:
        raise ConfigError(f"limits={limit} is neither bytes, like 2GiB, nor a share, like 50%") from error


def files(corpora: str | None) -> list[Path]:
    """The files of a folder whose names end with a limit.

    Raises: ConfigError: there are none."""
    if corpora is None:
        return []
    found = [f for f in sorted(Path(corpora).glob("*.csv")) if f.stem.rpartition(".")[2].isdecimal()]
    if not found:
        raise ConfigError(f"corpora={corpora} holds no NAME.LIMIT.csv, such as A.1048576.csv")
    return found
