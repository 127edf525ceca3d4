"""``save`` and ``load``: the whole state of a Pipeline in a folder, on no rank all of it, whatever the cut.

``Saving`` is a save in parts, so that those that wait for the disk may run in a thread beside training."""

import contextlib
import functools
import json
import math
import secrets
import shutil
from collections import UserDict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..compression.errors import CheckpointError, ConfigError, Disagreement, PenstockError, PlanError
from ..stages.device import is_gpu
from ..stages.files import open_regular, reason, refusing, save_json, sync
from ..stages.memory.evictable_tensor import EvictableTensor
from ..stages.safetensors_io import Receipt, TensorFile, checksum, write_tensors
from .data.options import check_count
from .pipeline import Pipeline
from .runtime.state import chosen, put_together

INDEX = "index.json"
_MOST_INDEX_BYTES = 64 << 20
FORMAT = 1


class OnDemand(UserDict[str, Any]):
    """A mapping of values and of functions that read a tensor anew whenever it is asked for."""

    def __getitem__(self, key: str) -> Any:
        item = self.data[key]
        return item() if callable(item) else item


class Checkpoint:
    """A checkpoint to read.

    Attributes: index: its content; checksum: by which two ranks know that they read the same.
    Raises:     CheckpointError: there is none in ``folder``, or its index was altered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path, cause = folder / INDEX, None
        try:
            with open_regular(path, most=_MOST_INDEX_BYTES) as file:
                index = json.load(file)
            self.checksum = index.pop("checksum")
            whole = index["format"] == FORMAT and self.checksum == _checksum(index)
            self.index: Mapping[str, Any] = index
            self.step, self.notes = int(index["step"]), index["notes"]
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder} holds no checkpoint, found no {INDEX} in it; give the folder of one that was saved"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({reason(error)}); see to it") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            whole, cause = False, error
        if not whole:
            raise CheckpointError(
                f"{path} is damaged or of another version; take an earlier checkpoint"
            ) from cause

    def parts(self) -> Iterator[TensorFile]:
        """The files that every rank wrote, opened one after the other; raises CheckpointError."""
        for noted in self.index["parts"]:
            name = Path(noted["file"]).name
            yield TensorFile(self.folder / name, Receipt(noted["bytes"], noted["header"]))

    def model_file(self, path: Path) -> None:
        """Write the plain model's tensors as safetensors, one at a time; a tied one under all its names."""
        found = {
            key: (file, name)
            for file in self.parts()
            for key, name in file.notes["keys"].items()
            if key not in file.notes["hidden"]
        }
        shapes = {key: file.shape(name) for key, (file, name) in found.items()}
        write_tensors(path, shapes, read=lambda key: found[key][0].read(found[key][1]))

    def state(
        self, keys: Collection[str], names: Collection[str], *, streams: bool = False
    ) -> tuple[dict[str, Any], set[str], set[str]]:
        """Read the tensors of these keys of the model and these parameters of optimizers.

        Args:    streams: each is read now to know that it is whole, and again whenever it is asked for.
        Returns: the state as ``state_dict`` has it, with those only; all keys and parameters there are."""
        parts, every = [], (set[str](), set[str]())
        for file in self.parts():
            notes, used = chosen(file.notes, keys, names)
            tensors: dict[str, Any] = {}
            for name in used:
                tensor = file.read(name)
                tensors[name] = functools.partial(file.read, name) if streams else tensor
                del tensor  # of a stream one is there at a time
            parts.append((notes, tensors))
            every[0].update(file.notes["keys"])
            every[1].update(file.notes["optimizer"])
        rest = {name: self.index[name] for name in ("scaler", "versions")}
        state = put_together(parts, sorted(keys), self.step) | rest
        if streams:
            state["model"] = OnDemand(state["model"])
            for kept in state["optimizer"].values():
                kept.update({part: OnDemand(items) for part, items in kept.items()})
        return state, *every

    def shares(self) -> tuple[list[list[int]], dict[int, float]]:
        """Return the weights by which the replicas of each stage took its micro-batches, and the smoothed
        seconds of ranks for one, as far as the next shares depend on them."""
        stages = self.index["plan"]["stages"]
        listed = [stage.get("shares") or [1] * len(stage.get("ranks", [0])) for stage in stages]
        shares = [[int(weight) for weight in weights] for weights in listed]
        seconds = {int(rank): float(one) for rank, one in self.index.get("seconds", {}).items()}
        return shares, {rank: one for rank, one in seconds.items() if 0 < one < math.inf}


def _checksum(index: Mapping[str, Any]) -> str:
    return checksum(json.dumps(index, sort_keys=True).encode())


def save(
    pipe: Pipeline, folder: str | Path, *, notes: Mapping[str, Any] | None = None, keep: int | None = None
) -> None:
    """Write a checkpoint of ``pipe`` into ``folder``, in the place of one that is there; collective.

    What is in flight is finished first. Every rank writes its part, into one folder that all of them see: on
    several machines a shared one. Until the last byte is there the former checkpoint stays.

    Args:
        notes: What ``load`` shall return, as far as JSON can say it: an epoch, a place in the data.
        keep: Write it into ``folder/step_00000012`` instead, where only so many of the newest stay; those of
            later steps are of another past, and go, too. ``newest(folder)`` finds the last one.

    Raises:
        ConfigError: The file system refuses.
        PlanError: Another rank failed.
    """
    if keep is not None:
        check_count(keep=keep)
    root = Path(folder)
    with pipe.interrupts.alone():
        path = root if keep is None else root / f"step_{pipe.num_steps:08}"
        saving = Saving(pipe, path, notes=notes or {})
        saving.write()
        saving.agree()
        saving.seal()
        saving.finish()
        if keep is not None and pipe.rank == 0:
            stays = [one for one in _whole(root) if one.name <= path.name][:keep]
            for old in {*root.glob("step_*")} - {*stays}:
                with contextlib.suppress(ConfigError):  # what cannot be removed is left for the next one
                    remove(old)


def newest(folder: str | Path) -> Path | None:
    """Return the last checkpoint that ``save(..., keep=)`` wrote into ``folder``; None if there is none."""
    return next(iter(_whole(Path(folder))), None)


def _whole(root: Path) -> list[Path]:
    """Return the checkpoints that have their index, that of the last step first."""
    return sorted((path for path in root.glob("step_*") if (path / INDEX).exists()), reverse=True)


def remove(folder: Path) -> None:
    """Remove a checkpoint; raises ConfigError where the file system refuses."""
    with refusing(folder):
        (folder / INDEX).unlink(missing_ok=True)  # first: half of one is none
        shutil.rmtree(folder)


def load(pipe: Pipeline, folder: str | Path) -> Mapping[str, Any]:
    """Take over the checkpoint in ``folder``, on whatever cut; collective. Each rank reads what it holds.

    What is in flight is finished first. A checkpoint of asynchronous training fits the same schedule, policy
    and cuts only, because they decide which weights a micro-batch sees.

    Returns:
        The notes that it was saved with.

    Raises:
        CheckpointError: There is none, or some of it is damaged.
        PlanError: It does not suit. Both on every rank, and nothing changed.
    """
    with pipe.interrupts.alone():
        pipe.drain()
        pipe.failures.check_open()
        found, (state, keys, names), shares = _read_part(pipe, Path(folder))
        with pipe.agreement.all_or_none("loading a checkpoint"):
            parts = pipe.state.checked(pipe.update, state, pipe.plan, keys=keys)
        with pipe.loading():
            pipe.num_steps = pipe.state.load(pipe.update, parts, names=names)
        pipe.begin_shares(*shares)
        pipe.same.counts.clear()
    return found.notes


class Saving:
    """A checkpoint on its way: copied now, drained; then ``write``, ``agree``, ``seal`` and ``finish``.

    ``write`` and ``seal`` wait for the disk, and may run in any thread; ``agree`` and ``finish`` are
    collective, and come when everybody's ``ended`` is true again.

    Raises: ConfigError: the folder cannot be made. PlanError: another rank failed."""

    def __init__(self, pipe: Pipeline, folder: Path, *, notes: Mapping[str, Any]) -> None:
        pipe.drain()
        pipe.failures.check()
        try:
            plain = json.loads(json.dumps(dict(notes)))
        except (TypeError, ValueError) as error:
            rule = "notes of a checkpoint are what JSON can say"
            raise PlanError(f"{rule}, found otherwise: {error}") from error
        self.pipe, self.folder = pipe, folder
        self.ended = self.agreed = False
        self._receipts: list[dict[str, Any]] = []
        self._error: Exception | None = None
        self._content = {
            "step": pipe.num_steps,
            "notes": plain,
            "scaler": pipe.update.scale.state(),
            "versions": pipe.plan.versions,
            "plan": pipe.plan.to_json(),
            "seconds": {str(rank): one for rank, one in pipe.load_balancer.seconds.items()},
            "made_by": {"penstock": __version__, "torch": str(torch.__version__)},
            "threads": torch.get_num_threads(),
        }
        # A copy of this rank's part: training may go on while another thread writes it. But where not all is
        # to be resident at once it is written now, tensor by tensor from where it is.
        streams, self._away = bool(pipe.update.mirrors), dict[str, EvictableTensor]()
        with pipe.agreement.all_or_none("saving a checkpoint"):
            self._notes, tensors = pipe.state.part(pipe.update, hidden=True)
            self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
            if streams:
                away = pipe.update.offloaded()
                self._away = {name: away[id(t)] for name, t in tensors.items() if id(t) in away}
                self._tensors |= {name: memory.like for name, memory in self._away.items()}
            else:
                for name, tensor in self._tensors.items():
                    self._tensors[name] = tensor.cpu() if is_gpu(tensor.device) else tensor.clone()
            with refusing(folder):
                folder.mkdir(parents=True, exist_ok=True)
        token = pipe.world.all_gather_json(secrets.token_hex(4))[0]
        self._path = folder / f"rank_{pipe.rank}_{token}.safetensors"  # beside one that stands there already
        if streams:
            self.write()

    def write(self) -> None:
        """Write this rank's part; what goes wrong is raised by ``agree``.

        Where that needs the parameters of a mirror it was done when this was made."""
        if self.ended:
            return
        try:
            receipt = write_tensors(self._path, self._tensors, notes=self._notes, read=self._read)
            part = {"file": self._path.name, "bytes": receipt.num_bytes, "header": receipt.header}
            self._receipts = [part]
        except Exception as error:
            self._error = error
        self._tensors, self._away, self.ended = {}, {}, True

    def _read(self, name: str) -> torch.Tensor:
        return self._away[name].get() if name in self._away else self._tensors[name]

    def agree(self) -> None:
        """Tell each other of the parts; behind everybody's ``write``; raises what went wrong in one."""
        self._raise("writing a checkpoint")
        self._receipts = self.pipe.world.all_gather_json(self._receipts[0])
        self.agreed, self.ended = True, False

    def seal(self) -> None:
        """Write the index, on rank 0; what goes wrong is raised by ``finish``."""
        try:
            if self.pipe.rank == 0:
                index = {"format": FORMAT, **self._content, "parts": self._receipts}
                with refusing(self.folder):
                    sync(self.folder.parent)  # every rank saw to its part: no crash can take what is named
                save_json(self.folder / INDEX, {**index, "checksum": _checksum(index)})
                mine = {part["file"] for part in self._receipts}
                for path in self.folder.glob("rank_*_*.safetensors"):
                    if path.name not in mine:  # of a checkpoint that was here
                        with contextlib.suppress(OSError):  # the next one will
                            path.unlink()
        except Exception as error:
            self._error = error
        self.ended = True

    def finish(self) -> None:
        """Know that the parts of all ranks are a checkpoint; behind everybody's ``seal``; raises likewise."""
        self._raise("the index of a checkpoint")

    def _raise(self, at: str) -> None:
        try:
            with self.pipe.agreement.all_or_none(at):
                if self._error:
                    raise self._error
        except PenstockError:
            with contextlib.suppress(OSError):
                if not (self.agreed and (self.folder / INDEX).exists()):  # which may name it by now
                    self._path.unlink(missing_ok=True)
            raise


def _read_part(pipe: Pipeline, folder: Path) -> tuple[Checkpoint, Any, Any]:
    """Read the part of a checkpoint that this rank needs; one damaged part is refused on every rank."""
    checkpoint, state, shares, message, cause = None, None, None, "", None
    try:
        checkpoint = Checkpoint(folder)
        state = checkpoint.state(*pipe.state.wanted(pipe.update), streams=bool(pipe.update.mirrors))
        shares = checkpoint.shares()
    except CheckpointError as error:
        message, cause = str(error), error
    except Exception as error:  # somebody forged it, with checksums that suit
        message, cause = f"{folder} says what no checkpoint does ({error!r}); take an earlier one", error
    mine = [message, checkpoint.checksum if checkpoint else ""]
    rows = pipe.agreement.exchange("a checkpoint to load", mine)
    if damage := next((theirs for theirs, _ in rows if theirs), ""):
        raise CheckpointError(damage) from cause
    assert checkpoint is not None
    for rank, (_, digest) in enumerate(rows):
        if digest != rows[0][1]:
            raise Disagreement(
                f"all ranks load one checkpoint: {folder} on rank {rank} is another one than on rank 0; give "
                "the same folder, on file systems that all of them share"
            )
    return checkpoint, state, shares
