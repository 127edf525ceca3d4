"""A model made without memory for its parameters (``model.load_weights=``), and the end of every model: its
file, gathered on rank 0 first, or written tensor by tensor where no rank is to have the whole."""

from __future__ import annotations

import contextlib
import pkgutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...compression.codec import decode, encode
from ...compression.errors import ConfigError
from ...stages.memory.tensor_memory import TensorMemory
from ...stages.meta_watch import META
from ...stages.tensor_file import in_order, write_tensors
from ..pipeline import Pipeline
from .model_file import rescuing, save_model

SOURCES = ("load_weights", "init_weights")


def is_bare(options: Mapping[str, Any]) -> bool:
    """Whether the options of a model say where its stages get their values from."""
    return any(options.get(name) for name in SOURCES)


def sources(options: Mapping[str, Any]) -> dict[str, Any]:
    """What ``Pipeline`` is given for it.

    Raises: ConfigError: a function cannot be imported."""
    init = options.get("init_weights")
    try:
        return {
            "load_weights": options.get("load_weights"),
            "init_weights": pkgutil.resolve_name(init) if init else None,
        }
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"model.init_weights={init} cannot be imported ({str(error).splitlines()[0]}); write the dotted "
            "name of a function of (name, tensor)"
        ) from error


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """The block in which modules are made whose parameters have no memory; buffers are what they are made."""
    plain, known = nn.Module.register_parameter, WeakIdKeyDictionary()

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and not param.is_meta:
            if param not in known:  # one under two names stays one
                known[param] = nn.Parameter(param.detach().to(META), param.requires_grad)
            param = known[param]
        plain(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]


Write = Callable[..., None]


def writer(options: Mapping[str, Any], pipe: Pipeline) -> Write:
    """What writes the model of those options at the end of a run: in turn what is not to be near at once."""
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


def _one(pipe: Pipeline, key: str, away: Mapping[int, TensorMemory]) -> torch.Tensor | None:
    """The tensor of a key of the model on rank 0, None elsewhere; collective.

    Args:   away: where those are that are not near, by identity."""
    state, frames = pipe.state, list[torch.Tensor]()
    first = state.shared.get(key, key)
    if state.source[first] == pipe.world.rank:
        held = state.held[first]
        near = away[id(held)].get() if id(held) in away else held
        frames.append(encode(near.detach().cpu(), codec="raw"))
    gathered = pipe.world.gather(frames, at="the weights")
    return next((decode(frame) for some in gathered or () for frame in some), None)


def _written(pipe: Pipeline, path: Path, before: Callable[[], object]) -> ConfigError | None:
    """Why the file could not be written, on rank 0; every rank hands over all that it has either way."""
    shapes = {key: pipe.state.expected[key] for key in pipe.state.keys}
    rest, error, away = iter(in_order(shapes)), None, pipe.update.away()

    def read(name: str) -> torch.Tensor:
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
