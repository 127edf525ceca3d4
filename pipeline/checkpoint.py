"""``save`` and ``load``: the whole state of a Pipeline in a folder, on no rank all of it, whatever the cut.

``Saving`` is a save in parts, so that those that wait for the disk may run in a thread beside training."""

from __future__ import annotations

import contextlib
import json
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..compression.errors import CheckpointError, Disagreement, PenstockError, PlanError
from ..stages.files import refusing
from .pipeline import Pipeline
from .runtime.checkpoint import INDEX, Checkpoint, Copy, part_name, write_index


def save(pipe: Pipeline, folder: str | Path, *, notes: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint of ``pipe`` into ``folder``, in the place of one that is there; collective.

    What is in flight is finished first. Every rank writes its part, into one folder that all of them see: on
    several machines a shared one. Until the last byte is there the former checkpoint stays.

    Args:    notes: what ``load`` shall return, as far as JSON can say it: an epoch, a place in the data.
    Raises:  ConfigError: the file system refuses. PlanError: another rank failed."""
    with pipe.engine.interrupts.alone():
        saving = Saving(pipe, Path(folder), notes=notes or {})
        saving.write()
        saving.agree()
        saving.seal()
        saving.finish()


def load(pipe: Pipeline, folder: str | Path) -> Mapping[str, Any]:
    """Take over the checkpoint in ``folder``, on whatever cut; collective. Each rank reads what it holds.

    What is in flight is finished first. A checkpoint of asynchronous training fits the same schedule, policy
    and cuts only, because they decide which weights a micro-batch sees.

    Returns: the notes that it was saved with.
    Raises:  CheckpointError: there is none, or some of it is damaged. PlanError: it does not suit. Both on
             every rank, and nothing changed."""
    with pipe.engine.interrupts.alone():
        pipe.drain()
        pipe.engine.failures.check_open()
        found, read, shares = _read(pipe, Path(folder))
        state, keys, names = read
        with pipe.agreement.together("loading a checkpoint"):
            parts = pipe.state.checked(pipe.update, state, pipe.plan, keys=keys)
        with pipe.loading():
            pipe.num_steps = pipe.state.load(pipe.update, parts, names=names)
        pipe.begin_shares(*shares)
        pipe.same.restart()
    return found.notes


def shares_in(found: Checkpoint) -> list[list[int]]:
    """By what weight the replicas of each stage took its micro-batches when the checkpoint was made."""
    stages = found.index["plan"]["stages"]
    return [stage.get("shares") or [1] * len(stage.get("ranks", [0])) for stage in stages]


def seconds_in(found: Checkpoint) -> dict[int, float]:
    """The smoothed seconds of ranks for a micro-batch, on which its next shares hang, if it has them."""
    told = found.index.get("seconds", {})
    pairs = told.items() if isinstance(told, dict) else ()
    return {
        int(rank): one
        for rank, one in pairs
        if rank.isdecimal() and isinstance(one, float) and 0 < one < math.inf
    }


class Saving:
    """A checkpoint on its way: copied now, drained; then ``write``, ``agree``, ``seal`` and ``finish``.

    ``write`` and ``seal`` wait for the disk, and may run in any thread; ``agree`` and ``finish`` are
    collective, and come when everybody's ``ended`` is true again.

    Raises: ConfigError: the folder cannot be made. PlanError: another rank failed."""

    def __init__(self, pipe: Pipeline, folder: Path, *, notes: Mapping[str, Any]) -> None:
        pipe.drain()
        pipe.engine.failures.check()
        self.pipe, self.folder = pipe, folder
        self.ended = self.agreed = False
        self._receipts: list[dict[str, Any]] = []
        self._error: Exception | None = None
        self._content = {
            "step": pipe.num_steps,
            "notes": _said(notes),
            "scaler": pipe.update.scale.state(),
            "versions": pipe.plan.versions,
            "plan": pipe.plan.to_json(),
            "seconds": {str(rank): one for rank, one in pipe.sharing.known().items()},
            "made_by": {"penstock": __version__, "torch": str(torch.__version__)},
            "threads": torch.get_num_threads(),
        }
        with pipe.agreement.together("saving a checkpoint"):
            self._copy = Copy(pipe.state, pipe.update)
            with refusing(folder):
                folder.mkdir(parents=True, exist_ok=True)
        token = pipe.world.all_gather_json(secrets.token_hex(4))[0]
        self._path = folder / part_name(pipe.rank, token)
        if self._copy.streams:
            self.write()

    def write(self) -> None:
        """Write this rank's part; what goes wrong is raised by ``agree``.

        Where that needs the parameters of a mirror it was done when this was made."""
        if self.ended:
            return
        try:
            self._receipts = [self._copy.write(self._path)]
        except Exception as error:
            self._error = error
        del self._copy
        self.ended = True

    def agree(self) -> None:
        """Tell each other of the parts; behind everybody's ``write``.

        Raises: ConfigError: the file system refused. PlanError: another rank failed."""
        self._raise("writing a checkpoint")
        self._receipts = self.pipe.world.all_gather_json(self._receipts[0])
        self.agreed, self.ended = True, False

    def seal(self) -> None:
        """Write the index, on rank 0; what goes wrong is raised by ``finish``."""
        try:
            if self.pipe.rank == 0:
                write_index(self.folder, self._content, self._receipts)
        except Exception as error:
            self._error = error
        self.ended = True

    def finish(self) -> None:
        """Know that the parts of all ranks are a checkpoint; behind everybody's ``seal``.

        Raises: ConfigError: the file system refused. PlanError: another rank failed."""
        self._raise("the index of a checkpoint")

    def _raise(self, at: str) -> None:
        try:
            with self.pipe.agreement.together(at):
                if self._error:
                    raise self._error
        except PenstockError:
            with contextlib.suppress(OSError):
                if not (self.agreed and (self.folder / INDEX).exists()):  # which may name it by now
                    self._path.unlink(missing_ok=True)
            raise


def _said(notes: Mapping[str, Any]) -> Any:
    """A copy of the notes as JSON says them."""
    try:
        return json.loads(json.dumps(dict(notes)))
    except (TypeError, ValueError) as error:
        raise PlanError(f"notes of a checkpoint are what JSON can say, found otherwise: {error}") from error


def _read(pipe: Pipeline, folder: Path) -> tuple[Checkpoint, Any, Any]:
    """What this rank needs of a checkpoint; refused on every rank if one of them cannot read its own."""
    found, read, shares, said, cause = None, None, None, "", None
    try:
        found = Checkpoint(folder)
        read = found.state(*pipe.state.wanted(pipe.update), streams=pipe.update.streams)
        shares = shares_in(found), seconds_in(found)
    except CheckpointError as error:
        said, cause = str(error), error
    except Exception as error:  # somebody forged it, with checksums that suit
        said, cause = f"{folder} says what no checkpoint does ({error!r}); take an earlier one", error
    rows = pipe.agreement.exchange("a checkpoint to load", [said, found.checksum if found else ""])
    if damage := next((theirs for theirs, _ in rows if theirs), ""):
        raise CheckpointError(damage) from cause
    assert found is not None
    for rank, (_, checksum) in enumerate(rows):
        if checksum != rows[0][1]:
            raise Disagreement(
                f"all ranks load one checkpoint: {folder} on rank {rank} is another one than on rank 0; give "
                "the same folder, on file systems that all of them share"
            )
    return found, read, shares
