"""The trained weights as a safetensors file, gathered on rank 0 first, or written tensor by tensor where no
rank is to have the whole; and what is said where it or others cannot be written."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...compression.codec import decode, encode
from ...compression.errors import ConfigError
from ...stages.memory.evictable_tensor import EvictableTensor
from ...stages.safetensors_io import in_order, write_tensors
from ..pipeline import Pipeline
from .build import is_bare

Write = Callable[..., None]


def writer(options: Mapping[str, Any], pipe: Pipeline) -> Write:
    """Return the writer of the model at the end of a run; offloaded tensors are read one after another."""
    return write_in_turn if is_bare(options) or pipe.update.streams else write_gathered


def write_gathered(pipe: Pipeline, path: Path, *, before: Callable[[], object]) -> None:
    """Write the model's tensors as safetensors on rank 0, which has all of them by then; ends ``pipe``.

    Args:    before: raises where the file is not to be written there.
    Raises:  ConfigError, on rank 0: the file system refuses, and where the weights are instead."""
    weights = pipe.state_dict()["model"]
    pipe.close()
    if pipe.rank == 0:
        with rescuing(path.name, weights):
            before()
            save_model(path, weights)


def write_in_turn(pipe: Pipeline, path: Path, *, before: Callable[[], object]) -> None:
    """The same for a rank 0 that has one tensor of others at a time; collective to the end."""
    error = _written(pipe, path, before)
    aside, lost = None, False
    if pipe.world.broadcast(float(error is not None), 0, at="the weights"):
        with contextlib.suppress(OSError):
            aside = Path(tempfile.mkdtemp(prefix="penstock_weights_")) / path.name if pipe.rank == 0 else None
        lost = _written(pipe, aside or path, lambda: None) is not None
    pipe.close(keeps_model=False)
    if error is not None:
        where = "the trained weights are lost" if lost or not aside else f"the trained weights are in {aside}"
        raise ConfigError(f"{error}; {where}") from error


def save_model(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a state dict as safetensors; a tied tensor stands under each of its names.

    Raises: ConfigError: the file system refuses.
    """
    write_tensors(path, tensors)


@contextlib.contextmanager
def rescuing(name: str, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Put the weights into a folder for temporary files if the block cannot, lest the training was in vain.

    Raises: ConfigError: what the block raised, and where the weights are.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error}; {_rescue(name, tensors)}") from error


@contextlib.contextmanager
def keeping(path: Path) -> Iterator[None]:
    """Say of whatever cannot be written in the block that the weights were."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error}; the trained weights are in {path}") from error


def _one(pipe: Pipeline, key: str, away: Mapping[int, EvictableTensor]) -> Tensor | None:
    """Return the tensor of a key of the model on rank 0, None elsewhere; collective.

    Args:
        away: Places of offloaded tensors, by identity."""
    state, frames = pipe.state, list[Tensor]()
    first = state.shared.get(key, key)
    if state.source[first] == pipe.world.rank:
        held = state.held[first]
        near = away[id(held)].get() if id(held) in away else held
        frames.append(encode(near.detach().cpu(), codec="raw"))
    gathered = pipe.world.gather(frames, at="the weights")
    return next((decode(frame) for some in gathered or () for frame in some), None)


def _written(pipe: Pipeline, path: Path, before: Callable[[], object]) -> ConfigError | None:
    """Write the file on rank 0, and return the error; every rank hands over all that it has either way."""
    shapes = {key: pipe.state.expected[key] for key in pipe.state.keys}
    rest, error, away = iter(in_order(shapes)), None, pipe.update.offloaded()

    def read(name: str) -> Tensor:
        assert next(rest) == name
        found = _one(pipe, name, away)
        assert found is not None
        return found

    if pipe.rank == 0:
        try:
            before()
            write_tensors(path, shapes, read=read)
        except ConfigError as found:
            error = found
    for name in rest:
        _one(pipe, name, away)
    return error


def _rescue(name: str, tensors: Mapping[str, Tensor]) -> str:
    try:
        aside = Path(tempfile.mkdtemp(prefix="penstock_weights_"))
    except OSError:
        return "the trained weights are lost"
    try:
        save_model(aside / name, tensors)
    except ConfigError:
        aside.rmdir()
        return "the trained weights are lost"
    return f"the trained weights are in {aside / name}"
