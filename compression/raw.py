"""What a codec is, and the one that copies: for what does not shrink, and to compare the others with."""

from __future__ import annotations

import ctypes
from typing import NamedTuple, Protocol

import torch

from .frame import FLOATS, OTHERS
from .geometry import Words


class Packed(NamedTuple):
    """What was written: the codec that reads it back (raw where nothing shrank), and the payload's bytes."""

    codec: str
    num_bytes: int


class Codec(Protocol):
    """One way to write words; addresses are integers."""

    name: str
    dtypes: frozenset[torch.dtype]
    """Those on which ``codec=auto`` tries it; it may be asked for any by name."""

    def max_bytes(self, num_words: int, bits: int) -> int:
        """Room that ``pack`` needs at ``out``, in bytes."""
        ...

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        """Whether a payload of ``num_bytes`` can hold these words; asked before memory is taken."""
        ...

    def pack(self, words: Words, out: int) -> Packed:
        """Write the payload of ``words`` to the address ``out``, never longer than the words themselves."""
        ...

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        """Read a payload of a length that ``fits``; CodecError if it contradicts itself, and nothing else."""
        ...


class Raw:
    """The words as they are."""

    name, dtypes = "raw", FLOATS | OTHERS

    def max_bytes(self, num_words: int, bits: int) -> int:
        """Room that ``pack`` needs, in bytes."""
        return num_words * bits // 8

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        """Whether a payload of ``num_bytes`` can hold these words."""
        return num_bytes == num_words * bits // 8

    def pack(self, words: Words, out: int) -> Packed:
        """Copy ``words`` to the address ``out``."""
        ctypes.memmove(out, words.address, num_bytes := words.num_bytes)
        return Packed("raw", num_bytes)

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        """Copy the ``num_bytes`` bytes at the address ``payload`` to ``out``."""
        ctypes.memmove(out.address, payload, num_bytes)
