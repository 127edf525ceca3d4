"""What the launches of every kernel share: where the kernels are, their options, and the facts they leave.

Facts about a payload are three int64 on its device, since nobody waits for them: its bytes, the number of the
codec that reads it (0: raw), and the checksum of the bitmap that its values were selected with.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .errors import CodecError
from .frame import ALIGNMENT

_INTEGERS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


def kernels(name: str) -> ModuleType:
    """The Triton loops of ``compression/kernels/``.

    Raises: CodecError: this installation has no Triton.
    """
    try:
        return import_module(f".kernels.{name}", __package__)
    except ImportError as error:
        remedy = "install the triton that this torch asks for, or move the tensor to the CPU"
        raise CodecError(f"kernels for a GPU need Triton, found none ({error}); {remedy}") from error


def new_facts(device: torch.device) -> Tensor:
    """Facts of nothing: zeros."""
    return torch.zeros(3, dtype=torch.int64, device=device)


def no_error(device: torch.device) -> Tensor:
    """A flag that kernels set where a payload contradicts itself: int32, 0."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def empty(num_words: int, bits: int, device: torch.device) -> Tensor:
    """Words not yet written."""
    return torch.empty(num_words, dtype=_INTEGERS[bits], device=device)


def at_64(memory: Tensor) -> Tensor:
    """``memory``, copied if it does not begin at a multiple of 64."""
    return memory.clone() if memory.data_ptr() % ALIGNMENT or memory.storage_offset() % 8 else memory


def options(num_warps: int, **constants: Any) -> dict[str, Any]:
    """Keywords of a launch; there is no floating point, and Triton warns where fusing it is left open."""
    return {"num_warps": num_warps, "enable_fp_fusion": False, **constants}


def pack_raw(words: Tensor, payload: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Copy ``words`` to ``payload``; returns the facts."""
    payload[: words.nbytes].copy_(words.view(torch.uint8))
    facts = new_facts(words.device)
    facts[0].fill_(words.nbytes)
    return facts


def unpack_raw(payload: Tensor, out: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Copy ``payload`` to ``out``; returns the flag of no error."""
    out.view(torch.uint8).copy_(payload)
    return no_error(out.device)
