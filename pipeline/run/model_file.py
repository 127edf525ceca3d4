"""The trained weights as a safetensors file, and what is said where it or others cannot be written."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from ...compression.errors import ConfigError
from ...stages.tensor_file import write_tensors


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
