"""The trained weights as a safetensors file, written tensor by tensor, so that no rank needs the whole."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import Tensor

from ...compression.codec import decode, encode
from ...compression.errors import ConfigError
from ...stages.memory.evictable_tensor import EvictableTensor
from ...stages.tensor_file import in_order, write_tensors
from ..pipeline import Pipeline


def write_model(pipe: Pipeline, path: Path, *, before: Callable[[], object]) -> None:
    """Write the model's tensors on rank 0 and end ``pipe``; collective.

    Where that fails they go into a folder for temporary files, lest the training was in vain.

    Args:
        before: Raises where the file is not to be written there.

    Raises:
        ConfigError: On rank 0: the file system refuses; the sentence says where the weights are instead.
    """
    error, aside, lost = _write(pipe, path, before), None, False
    if pipe.world.broadcast(float(error is not None), 0, at="the weights"):
        with contextlib.suppress(OSError):
            aside = Path(tempfile.mkdtemp(prefix="penstock_weights_")) / path.name if pipe.rank == 0 else None
        lost = _write(pipe, aside or path, lambda: None) is not None
    pipe.close(keeps_model=False)
    if lost and aside:
        aside.parent.rmdir()
    if error is not None:
        where = "the trained weights are lost" if lost or not aside else f"the trained weights are in {aside}"
        raise ConfigError(f"{error}; {where}") from error


@contextlib.contextmanager
def keeping(path: Path) -> Iterator[None]:
    """Say of whatever cannot be written in the block that the weights were."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error}; the trained weights are in {path}") from error


def _write(pipe: Pipeline, path: Path, before: Callable[[], object]) -> ConfigError | None:
    """Write the file on rank 0, and return the error; every rank hands over all that it has either way."""
    shapes = {key: pipe.state.expected[key] for key in pipe.state.keys}
    rest, error, offloaded = iter(in_order(shapes)), None, pipe.update.offloaded()

    def read(name: str) -> Tensor:
        assert next(rest) == name
        tensor = _gather(pipe, name, offloaded)
        assert tensor is not None
        return tensor

    if pipe.rank == 0:
        try:
            before()
            write_tensors(path, shapes, read=read)
        except ConfigError as refusal:
            error = refusal
    for name in rest:
        _gather(pipe, name, offloaded)
    return error


def _gather(pipe: Pipeline, key: str, offloaded: Mapping[int, EvictableTensor]) -> Tensor | None:
    """Return the tensor of a key of the model on rank 0, None elsewhere; collective.

    Args:
        offloaded: Places of offloaded tensors, by identity.
    """
    state, frames = pipe.state, list[Tensor]()
    first = state.shared.get(key, key)
    if state.source[first] == pipe.world.rank:
        tensor = state.held[first]
        resident = offloaded[id(tensor)].get() if id(tensor) in offloaded else tensor
        frames.append(encode(resident.detach().cpu(), codec="raw"))
    gathered = pipe.world.gather(frames, at="the weights")
    return next((decode(frame) for some in gathered or () for frame in some), None)
