"""What each topic refuses of its options before torch is imported: names, links, counts and ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...compression import names
from ...compression.errors import ConfigError
from ...conf.bench import BenchPipelineConfig
from ...conf.bench_codecs import BenchCodecsConfig
from ...conf.convergence import BenchConvergenceConfig
from ...pipeline.ranks.launch import check_ranks
from ...pipeline.run import early
from ...stages.units import parse_bytes
from .codecs_peers import PEERS
from .contestants import POLICIES, Entrant, entrants
from .shaped_links import Link, parse_link

CLASSES = ("synthetic", "images", "text", "integers", "masks", "job")
DTYPES = ("float64", "float32", "float16", "bfloat16")


def codecs(config: BenchCodecsConfig, typed: Sequence[str] = ()) -> None:
    """Refuse classes, dtypes, codecs and sizes that are none.

    Raises: PenstockError: it names the option.
    """
    early.check(config, typed)
    _known("classes", config.classes, CLASSES)
    _known("dtypes", config.dtypes, DTYPES)
    _known("codecs", config.codecs or (), (*names.lossless(), *PEERS))
    for size in config.sizes:
        parse_bytes(size, name="sizes")


def pipeline(config: BenchPipelineConfig, typed: Sequence[str] = ()) -> None:
    """Refuse codecs, links, schedules and ranks that do not suit each other."""
    (links if config.schedule == "1f1b" else contestants)(config)
    for group in ("model", "data", "optimizer"):
        early.check_group(group, getattr(config, group))


def links(config: BenchPipelineConfig) -> list[Link]:
    """Return the links to race on.

    Raises: PenstockError: a codec or a link is not known, or the ranks do not suit them.
    """
    for name in config.codecs:
        names.check_name(name)
    found = [parse_link(link, burst=config.burst, delay=config.delay) for link in config.links]
    shaped = [link.name for link in found if link.rate is not None]
    if shaped and config.ranks != 2:
        raise ConfigError(
            f"ranks={config.ranks}: a shaped link joins 2; leave {', '.join(shaped)} out or take ranks=2"
        )
    if config.schedule == "1f1b" and config.cuts is not None and len(config.cuts) != config.ranks - 1:
        raise ConfigError(
            f"torch's 1F1B runs one stage on each rank: ranks={config.ranks} needs {config.ranks - 1} cuts, "
            f"found {len(config.cuts)}"
        )
    check_ranks(config.ranks)
    return found


def contestants(config: BenchPipelineConfig) -> tuple[Link, dict[str, Entrant]]:
    """Return the link to race schedules on, and who races.

    Raises: PenstockError: a schedule, a codec or a link is not known, or the ranks do not suit them.
    """
    chosen = entrants(config.schedule)
    return links(config)[0], chosen


def convergence(config: BenchConvergenceConfig, typed: Sequence[str] = ()) -> None:
    """Refuse policies, a codec and groups that are not known."""
    _known("policies", config.policies or (), POLICIES)
    names.check_name(config.codec)
    for group in ("model", "optimizer", "scheduler"):
        early.check_group(group, getattr(config, group))
    for name in config.sets:
        early.check_group("data", getattr(config, name), name=name)


def _known(option: str, asked: Sequence[str], known: Collection[str]) -> None:
    for name in asked:
        if name not in known:
            found = f"{option}=[{','.join(asked)}] holds {name}, which is not known"
            raise ConfigError(f"{found}; known are {', '.join(known)}")
