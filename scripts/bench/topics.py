"""``penstock bench TOPIC``: the topics, and what each refuses of its options before torch is imported.

The file of a topic has ``bench(config, record)``, which measures, and ``figure(results)``, which draws."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...compression import names
from ...compression.errors import ConfigError
from ...conf.bench import BenchPipelineConfig
from ...conf.bench_cache import BenchCacheConfig
from ...conf.bench_checkpoint import BenchCheckpointConfig
from ...conf.bench_codecs import BenchCodecsConfig
from ...conf.bench_offload import BenchOffloadConfig
from ...conf.bench_replicas import BenchReplicasConfig
from ...conf.convergence import BenchConvergenceConfig
from ...pipeline.ranks.launch import check_ranks
from ...pipeline.run import early
from ...pipeline.run.run_folder import RunFolder
from ...stages.units import parse_bytes
from .. import usage
from .cache_sides import CONTESTANTS as CACHES
from .cache_sides import PARTS, READS
from .codecs_peers import PEERS
from .contestants import POLICIES, entrants
from .offload_sides import CASES, CONTESTANTS, NETWORKS, TRACES, bytes_of, files
from .replicas_sides import PARTS as REPLICAS
from .shaped_links import links_of

CLASSES = ("synthetic", "images", "text", "integers", "masks", "job")
DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One subject: its options, what refuses some of them before torch is imported, and the file for each."""

    schema: type[Any]
    early: Callable[[Any, Sequence[str]], object]
    home: Callable[[Any], str]


def codecs(config: BenchCodecsConfig, typed: Sequence[str] = ()) -> None:
    """Refuse classes, dtypes, codecs and sizes that are none; the error names the option."""
    early.check(config, typed)
    _known("classes", config.classes, CLASSES)
    _known("dtypes", config.dtypes, DTYPES)
    _known("codecs", config.codecs or (), (*names.lossless(), *PEERS))
    for size in config.sizes:
        parse_bytes(size, name="sizes")


def pipeline(config: BenchPipelineConfig, typed: Sequence[str] = ()) -> None:
    """Refuse codecs, links, schedules and ranks that do not suit each other."""
    if config.schedule != "1f1b":
        entrants(config.schedule)
    elif config.cuts is not None and len(config.cuts) != config.ranks - 1:
        raise ConfigError(
            f"torch's 1F1B runs one stage on each rank: ranks={config.ranks} needs {config.ranks - 1} cuts, "
            f"found {len(config.cuts)}"
        )
    for name in config.codecs:
        names.check_name(name)
    links_of(config)
    check_ranks(config.ranks)
    for group in ("model", "data", "optimizer"):
        early.check_group(group, getattr(config, group))


def cache(config: BenchCacheConfig, typed: Sequence[str] = ()) -> None:
    """Refuse parts, policies, what is read and sizes that are not known."""
    _known("parts", config.parts, PARTS)
    _known("policies", config.policies, CACHES)
    _known("reads", config.reads, READS)
    for name in ("sample_bytes", "rate"):
        parse_bytes(getattr(config, name), name=name)


def checkpoint(config: BenchCheckpointConfig, typed: Sequence[str] = ()) -> None:
    """Refuse a job that cannot be trained, and codecs that are not known or lose bits."""
    early.check(config.job(), typed)
    _known("codecs", config.codecs, names.lossless())


def convergence(config: BenchConvergenceConfig, typed: Sequence[str] = ()) -> None:
    """Refuse policies, a codec and groups that are not known."""
    _known("policies", config.policies or (), POLICIES)
    names.check_name(config.codec)
    for group in ("model", "optimizer", "scheduler"):
        early.check_group(group, getattr(config, group))
    for name in config.sets:
        early.check_group("data", getattr(config, name), name=name)


def offload(config: BenchOffloadConfig, typed: Sequence[str] = ()) -> None:
    """Refuse a job that cannot be trained, names that are not known, limits and folders that are none."""
    early.check(config.job(), typed)
    _known("cases", config.cases, CASES)
    _known("contestants", config.contestants, CONTESTANTS)
    _known("networks", config.networks, NETWORKS)
    _known("traces", config.traces, TRACES)
    for limit in config.limits:
        bytes_of(limit, 1)
    parse_bytes(config.speed_bytes, name="speed_bytes")
    files(config.corpora)
    if config.path is not None and not Path(config.path).is_dir():
        raise ConfigError(f"path={config.path} is no folder; name the one for the file of the tier disk")


def replicas(config: BenchReplicasConfig, typed: Sequence[str] = ()) -> None:
    """Refuse a job that cannot be trained, and parts that are not known."""
    early.check(config.job(), typed)
    _known("parts", config.parts, REPLICAS)


def _known(option: str, asked: Sequence[str], known: Collection[str]) -> None:
    for name in asked:
        if name not in known:
            found = f"{option}=[{','.join(asked)}] holds {name}, which is not known"
            raise ConfigError(f"{found}; known are {', '.join(known)}")


TOPICS = {
    "cache": Topic(schema=BenchCacheConfig, early=cache, home=lambda config: "cache_bench"),
    "checkpoint": Topic(
        schema=BenchCheckpointConfig, early=checkpoint, home=lambda config: "checkpoint_bench"
    ),
    "codecs": Topic(schema=BenchCodecsConfig, early=codecs, home=lambda config: "codecs_bench"),
    "convergence": Topic(schema=BenchConvergenceConfig, early=convergence, home=lambda config: "convergence"),
    "offload": Topic(schema=BenchOffloadConfig, early=offload, home=lambda config: "offload_bench"),
    "pipeline": Topic(
        schema=BenchPipelineConfig,
        early=pipeline,
        home=lambda config: "link_race" if config.schedule == "1f1b" else "schedules",
    ),
    "replicas": Topic(schema=BenchReplicasConfig, early=replicas, home=lambda config: "replicas_bench"),
}


def main(arguments: Sequence[str]) -> int:
    """Run the topic that ``arguments`` begins with; return the exit code.

    Raises: ConfigError: there is no such topic, or an option of it does not fit.
    """
    name, known = (*arguments[:1], "")[0], ", ".join(TOPICS)
    if usage.wanted(arguments[:1]):
        print(f"penstock bench TOPIC [KEY=VALUE ...]\n\nTOPIC, each with a --help: {known}")
        return 0
    if name not in TOPICS:
        named = name and not name.startswith("-")
        found = f"{name} is no topic of penstock bench" if named else "penstock bench needs a topic first"
        raise ConfigError(f"{found}; known are {known}")
    topic, rest, typed = TOPICS[name], arguments[1:], f"bench {name}"
    if usage.wanted(rest):
        print(usage.text(typed, topic.schema))
        return 0
    from ..application import run

    def task(config: Any, folder: RunFolder, options: Sequence[str]) -> None:
        from .harness import Record

        record, home = (
            Record(name, options, folder),
            importlib.import_module(f".{topic.home(config)}", __package__),
        )
        home.bench(config, record)
        record.end(home.figure)

    return run(f"bench_{name}", topic.schema, task, arguments=rest, early=topic.early, command=typed)
