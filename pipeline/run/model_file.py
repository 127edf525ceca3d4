"""The trained weights as one safetensors file, which no interruption can leave half true.

The library's own writer gives a hidden file its whole length and its header first, and a kill leaves zeros
that open as a model. Here bytes follow each other: no file is safetensors before its last byte is written."""

from __future__ import annotations

import contextlib
import json
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...compression.errors import ConfigError
from ...stages.files import writing


def save_model(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a state dict as safetensors; a tied tensor stands under each of its names.

    Raises: ConfigError: the file system refuses.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps all aligned
    header: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        header[name] = {
            "dtype": _dtype(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with writing(path) as part, part.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            plain = tensors[name].detach().cpu().contiguous()
            file.write(plain.reshape(-1).view(torch.uint8).numpy().data)


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


def _dtype(dtype: torch.dtype) -> str:
    """Return the format's name for ``dtype``, from the library, which knows them all."""
    from safetensors.torch import save

    return json.loads(save({"": torch.empty(0, dtype=dtype)})[8:])[""]["dtype"]
