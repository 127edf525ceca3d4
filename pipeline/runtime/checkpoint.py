"""A checkpoint as files: a part from every rank, and an index, renamed into place last, which makes them one.

    FOLDER/index.json                       step, plan, notes, and of every part its name, length and checksum
    FOLDER/rank_0_5c1f0a22.safetensors ...  tensors by the model's own names; in the header what JSON can say

A rank writes what it answers for and reads what it holds, from whichever part has it, so none ever needs
room for the whole. Parts of a save that did not end have no index, and an index never names a part that is
not whole; checksums find what became of both later: of the index, by it of each header, by that of each
tensor."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...compression.errors import CheckpointError
from ...stages.device import is_gpu
from ...stages.files import open_regular, reason, refusing, save_json, sync
from ...stages.memory.evictable_tensor import TensorMemory
from ...stages.tensor_file import Receipt, TensorFile, checksum, write_tensors
from ..weights.update import Update
from .on_demand import Unread, on_demand
from .state import State, chosen, put_together

INDEX = "index.json"
_MOST_INDEX_BYTES = 64 << 20
FORMAT = 1


class Copy:
    """This rank's part of a state as it is now: training may go on while another thread writes it.

    Attributes: streams: nothing was copied, since not all is to be near at once: it is written tensor by
                tensor from where it is, and training waits for that."""

    def __init__(self, state: State, update: Update) -> None:
        self.said, tensors = state.part(update, hidden=True)
        self.streams, self._away = update.streams, dict[str, TensorMemory]()
        if self.streams:
            away = update.away()
            self._away = {name: away[id(tensor)] for name, tensor in tensors.items() if id(tensor) in away}
            self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
            self.tensors |= {name: memory.like for name, memory in self._away.items()}
        else:
            self.tensors = {name: _copied(tensor.detach()) for name, tensor in tensors.items()}

    def write(self, path: Path) -> dict[str, Any]:
        """Write the part; return what the index says of it.

        Raises: ConfigError: the file system refuses."""
        receipt = write_tensors(path, self.tensors, notes=self.said, read=self._read)
        return {"file": path.name, "bytes": receipt.num_bytes, "header": receipt.header}

    def _read(self, name: str) -> torch.Tensor:
        return self._away[name].get() if name in self._away else self.tensors[name]


def part_name(rank: int, token: str) -> str:
    """The file of a rank's part; ``token`` tells it from one that stands there already."""
    return f"rank_{rank}_{token}.safetensors"


def write_index(folder: Path, content: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
    """Make the parts a checkpoint, in the place of one that was in ``folder``; remove parts of others.

    Raises: ConfigError: the file system refuses."""
    index = {"format": FORMAT, **content, "parts": list(parts)}
    with refusing(folder):
        sync(folder.parent)  # every rank saw to its part: the index names nothing that a crash can take
    save_json(folder / INDEX, {**index, "checksum": _checksum(index)})
    mine = {part["file"] for part in parts}
    for path in folder.glob("rank_*_*.safetensors"):
        if path.name not in mine:
            with contextlib.suppress(OSError):  # the next one will
                path.unlink()


class Checkpoint:
    """A checkpoint to read.

    Attributes: index: its content; checksum: by which two ranks know that they read the same.
    Raises:     CheckpointError: there is none in ``folder``, or its index was altered."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / INDEX
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
            raise self._altered() from error
        if not whole:
            raise self._altered()

    def parts(self) -> Iterator[TensorFile]:
        """The files that every rank wrote, opened one after the other.

        Raises: CheckpointError: one is missing, shorter, or its header was altered."""
        for noted in self.index["parts"]:
            name = Path(noted["file"]).name
            yield TensorFile(self.folder / name, Receipt(noted["bytes"], noted["header"]))

    def model_file(self, path: Path) -> None:
        """Write the plain model's tensors as safetensors, one at a time; a tied one under all its names.

        Raises: CheckpointError: some of it is damaged. ConfigError: the file system refuses."""
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
        Returns: the state as ``state_dict`` has it, with those only; all keys and all parameters there are.
        Raises:  CheckpointError: a part is missing, shorter or altered where it was read."""
        parts, every = [], (set[str](), set[str]())
        for file in self.parts():
            said, used = chosen(file.notes, keys, names)
            parts.append((said, {name: _found(file, name, streams=streams) for name in used}))
            every[0].update(file.notes["keys"])
            every[1].update(file.notes["optimizer"])
        rest = {name: self.index[name] for name in ("scaler", "versions")}
        state = put_together(parts, sorted(keys), self.step) | rest
        return on_demand(state) if streams else state, *every

    def _altered(self) -> CheckpointError:
        return CheckpointError(
            f"{self.folder / INDEX} is damaged or of another version; take an earlier checkpoint"
        )


def _found(file: TensorFile, name: str, *, streams: bool) -> torch.Tensor | Unread:
    tensor = file.read(name)
    return Unread(file, name) if streams else tensor


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu() if is_gpu(tensor.device) else tensor.clone()


def _checksum(index: Mapping[str, Any]) -> str:
    return checksum(json.dumps(index, sort_keys=True).encode())
