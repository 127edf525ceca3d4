"""``penstock bench TOPIC``: measures one subject, prints its table and writes ``results.json``.

A number is worth what stands beside it, so the file says on which machine, with which versions, by which
command and when it was taken."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ... import __version__
from ...compression.errors import ConfigError
from ...conf.schema import BenchCodecsConfig
from ...pipeline.run_folder import RunFolder, save_json
from .. import usage

WIDTH = 140
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8")


def main(arguments: Sequence[str]) -> int:
    """Run the topic that ``arguments`` begins with; return the exit code.

    Raises: ConfigError: there is no such topic, or an option of it does not fit.
    """
    topic = next((argument for argument in arguments if not argument.startswith("-")), None)
    if topic is None and usage.wanted(arguments):
        print(f"penstock bench TOPIC [KEY=VALUE ...]\n\nTOPIC, each with a --help: {', '.join(TOPICS)}")
        return 0
    if topic not in TOPICS:
        found = f"{topic} is no topic of penstock bench" if topic else "penstock bench needs a topic"
        raise ConfigError(f"{found}; known are {', '.join(TOPICS)}")
    rest = [argument for argument in arguments if argument != topic]
    if usage.wanted(rest):
        print(usage.text(f"bench {topic}", BenchCodecsConfig))
        return 0
    from ..application import run

    return run(f"bench_{topic}", BenchCodecsConfig, TOPICS[topic], arguments=rest)


def codecs(config: BenchCodecsConfig, folder: RunFolder, typed: Sequence[str]) -> None:
    """Time the zero-value codec beside a plain copy and the plain torch route."""
    import torch

    from ...pipeline import console
    from ...stages.units import parse_bytes
    from .capture import capture
    from .codecs import bench_codecs, table

    folder.claim()
    for name in config.dtypes:
        if name not in DTYPES:
            raise ConfigError(
                f"dtypes={config.dtypes} holds {name}, which is not known; known are {', '.join(DTYPES)}"
            )
    config.threads = config.threads or 1
    sizes = [parse_bytes(size, name="sizes") for size in config.sizes]
    captured = capture(config, num_steps=config.capture_steps) if config.capture else {}
    # Deterministic mode would fill every new tensor and so slow the torch route down.
    torch.set_deterministic_debug_mode("default")
    rows = bench_codecs(
        sizes=sizes,
        densities=config.densities,
        dtypes=[getattr(torch, name) for name in config.dtypes],
        captured=captured,
        repeats=config.repeats,
    )
    results = folder.path / "results.json"
    save_json(results, circumstances(typed) | {"threads": torch.get_num_threads(), "rows": rows})
    console.screen(width_of_a_log=WIDTH).print(table(rows))
    print(console.short(results))


def circumstances(typed: Sequence[str]) -> dict[str, Any]:
    """Return what a number needs beside it: command, hardware, versions, date."""
    import torch

    return {
        "command": shlex.join(["penstock", "bench", "codecs", *typed]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": {"cpu": _cpu(), "cores": os.cpu_count(), "machine": platform.machine()},
        "versions": {
            "penstock": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
        "system": f"{platform.system()} {platform.release()}",
    }


def _cpu() -> str:
    """Return the processor's name as its maker writes it, where the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


TOPICS: dict[str, Callable[[BenchCodecsConfig, RunFolder, Sequence[str]], None]] = {"codecs": codecs}
