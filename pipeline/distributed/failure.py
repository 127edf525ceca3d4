"""Reports of failed ranks, and the one cause among the consequences (law L7): all others lose a peer."""

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from ...compression.errors import PenstockError, TransportError
from .processes import Ends

_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")

_GLOO = "gloo/transport"  # in gloo's error for a connection that broke, never a rank's own failure


class Lost(TransportError):
    """Ranks were killed, lost or hang, ``rank`` the first, none by its own error: another try may go well."""

    def __init__(self, sentence: str, *, rank: int | None = None) -> None:
        super().__init__(sentence)
        self.rank = rank


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Report of a failing rank; ``consequence``: it lost a peer, whose failure is the cause."""

    rank: int
    sentence: str
    consequence: bool
    at: float
    trace: list[str]


def leave(errors: Path, error: BaseException, *, rank: int | None = None) -> Failure:
    """Write what ended this rank into the folder ``errors``, whole or not at all; return it.

    ``rank``: where it is a thread; None: as the environment says."""
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    path = errors / f"rank{rank}.json"
    consequence = isinstance(error, TransportError) or _GLOO in str(error)
    sentence = str(error)
    if not isinstance(error, PenstockError):
        sentence = f"{type(error).__name__}: {error}"
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        # Torch reports some deaths of a loader's worker as a connection or a file that is gone.
        if isinstance(error, OSError | EOFError) and any(_LOADER in file for file in files):
            sentence = f"a DataLoader worker died before its batch was here ({sentence})"
    sentence = sentence if sentence.startswith(f"rank {rank}") else f"rank {rank}: {sentence}"
    failure = Failure(
        rank=rank,
        sentence=sentence + f"; its traceback is in {path}" * (not consequence),
        consequence=consequence,
        at=time.time(),
        trace="".join(traceback.format_exception(error)).splitlines(),
    )
    part = path.with_suffix(".part")
    try:
        errors.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(dataclasses.asdict(failure), indent=1))
        part.replace(path)
    except OSError as refused:  # a full disk may be the very error
        print(f"{sentence} ({path} cannot be written: {refused.strerror})", file=sys.stderr)
        return dataclasses.replace(failure, sentence=sentence)
    return failure


def read_failures(errors: Path) -> list[Failure]:
    """Return the reports of ranks in the order in which they failed, without those that are half-written."""
    failures = []
    for path in errors.glob("rank*.json"):
        with contextlib.suppress(ValueError, TypeError):
            failures.append(Failure(**json.loads(path.read_text())))
    return sorted(failures, key=lambda failure: failure.at)


def cause(
    ends: Ends, failures: Sequence[Failure], *, stages_of_rank: Sequence[Sequence[int]]
) -> PenstockError:
    """Return a rank's own error, else a rank that ended mute, else one that did not even end when told to,
    else the first that lost a peer; with the traceback of a rank that left one."""
    own = [failure for failure in failures if not failure.consequence]
    chosen = PenstockError(own[0].sentence) if own else _lost(ends, failures, stages_of_rank)
    if first := own or failures:
        chosen.add_note("\n".join(first[0].trace))
    return chosen


def _lost(ends: Ends, failures: Sequence[Failure], stages_of_rank: Sequence[Sequence[int]]) -> Lost:
    reported = {failure.rank for failure in failures}
    mute = [rank for rank in ends.codes if rank not in reported]
    if mute:
        # gloo may abort a process whose peer has gone, so an abort is the last to be the cause.
        rank = min(mute, key=lambda rank: ends.codes[rank] == -signal.SIGABRT)
        code = ends.codes[rank]
        name = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
        end = f"was killed by {name}" + "; if nobody did that, memory ran out" * (name == "SIGKILL")
        if code >= 0:
            end = f"ended with exit code {code} and gave no reason; look at its output above"
    elif ends.stuck:
        rank, end = ends.stuck[0], "was stopped or hangs: it did not even end when it was told to"
    else:
        return Lost(failures[0].sentence)
    stages, seen = stages_of_rank[rank], f"; {failures[0].sentence}" if failures else ""
    where = f"rank {rank} (stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))})"
    return Lost(f"{where} {end}{seen}", rank=rank)
