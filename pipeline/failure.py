"""How a failed run is told: what each rank left behind, and the one cause among the consequences (law L7).

When one rank ends, all others lose a peer and say so; the sentence a person reads must name the first."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..compression.errors import PenstockError, TransportError

TOLD_TO_END = 128 + signal.SIGTERM
"""The exit code of a rank that ends because the launcher told it to."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a failing rank left behind; ``consequence``: it lost a peer, whose failure is the cause."""

    rank: int
    sentence: str
    consequence: bool
    at: float
    trace: list[str]


def leave(errors: Path, error: Exception) -> None:
    """Write what ended this rank into the folder ``errors``, whole or not at all."""
    rank = int(os.environ.get("RANK", "0"))
    path = errors / f"rank{rank}.json"
    sentence = str(error)
    if not isinstance(error, PenstockError):
        sentence = f"{type(error).__name__}: {error}; its traceback is in {path}"
    failure = Failure(
        rank=rank,
        sentence=sentence if sentence.startswith(f"rank {rank}") else f"rank {rank}: {sentence}",
        consequence=isinstance(error, TransportError),
        at=time.time(),
        trace="".join(traceback.format_exception(error)).splitlines(),
    )
    errors.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(dataclasses.asdict(failure), indent=1))
    part.replace(path)


def read_failures(errors: Path) -> list[Failure]:
    """Return what the ranks left, in the order in which they failed; a half-written file says nothing."""
    failures = []
    for path in errors.glob("rank*.json"):
        with contextlib.suppress(ValueError, TypeError):
            failures.append(Failure(**json.loads(path.read_text())))
    return sorted(failures, key=lambda failure: failure.at)


def cause(
    ends: Mapping[int, int], failures: Sequence[Failure], *, stages_of_rank: Sequence[Sequence[int]]
) -> PenstockError:
    """Choose what to tell: a rank's own error, else a rank that ended mute, else the first that lost a peer.

    Args: ends: the exit code of each failed rank, negative for a signal, the launcher's own SIGTERM included.
    """
    own = [failure for failure in failures if not failure.consequence]
    if own:
        return PenstockError(own[0].sentence)
    mute = {rank: code for rank, code in ends.items() if code not in (-signal.SIGTERM, TOLD_TO_END)}
    for failure in failures:
        mute.pop(failure.rank, None)
    seen = f"; {failures[0].sentence}" if failures else ""
    if mute:
        rank = min(mute)
        return TransportError(f"{_named(rank, stages_of_rank)} {_how(mute[rank])}{seen}")
    if failures:
        return TransportError(failures[0].sentence)
    return TransportError(f"{_named(min(ends), stages_of_rank)} was ended from outside by SIGTERM")


def _how(code: int) -> str:
    """Say how a rank ended that left no sentence."""
    if code >= 0:
        return f"ended with exit code {code} and gave no reason; look at its output above"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + "; if nobody did that, memory ran out" * (name == "SIGKILL")


def _named(rank: int, stages_of_rank: Sequence[Sequence[int]]) -> str:
    stages = stages_of_rank[rank]
    return f"rank {rank} (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})"
