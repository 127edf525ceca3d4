"""The protocol of codecs, and the one that copies: for what does not shrink, and to compare others with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from .frame import FLOATS, OTHERS
from .geometry import Words
from .kernels.jit import kernels


class Packed(NamedTuple):
    """The codec that reads a payload back (raw where nothing shrank), and the payload's bytes."""

    codec: str
    num_bytes: int


class Codec(Protocol):
    """One way to write words; addresses are integers."""

    name: str
    dtypes: frozenset[torch.dtype]
    """Those on which ``codec=auto`` tries it; it may be asked for any by name."""

    def max_bytes(self, num_words: int, bits: int) -> int:
        """Return the bytes that ``pack`` needs at ``out``."""
        ...

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        """Return whether a payload of ``num_bytes`` can hold these words; asked before memory is taken."""
        ...

    def pack(self, words: Words, out: int) -> Packed:
        """Write the payload of ``words`` to the address ``out``, never longer than the words themselves."""
        ...

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        """Read a payload of a length that ``fits`` to ``out``, and touch nothing else.

        Raises:
            CodecError: The payload contradicts itself; nothing else ever.
        """
        ...


class Base:
    """Base of the codecs: kernels of one instruction set, by default the host's best."""

    name: str

    def __init__(self, isa: str | None = None) -> None:
        self.isa = isa
        self._kernels: Mapping[str, Callable[..., int]] = {}

    def kernel(self, name: str) -> Callable[..., int]:
        """Return the compiled function ``name``, built at the first use."""
        if not self._kernels:
            self._kernels = kernels(self.name, self.isa).call
        return self._kernels[name]

    def max_bytes(self, num_words: int, bits: int) -> int:
        """Return the bytes that ``pack`` needs: those of the words, should they go raw."""
        return num_words * bits // 8


class Raw(Base):
    """The words as they are."""

    name, dtypes = "raw", FLOATS | OTHERS

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        """Return whether the payload has the words' length."""
        return num_bytes == num_words * bits // 8

    def pack(self, words: Words, out: int) -> Packed:
        """Copy ``words`` to the address ``out``."""
        ctypes.memmove(out, words.address, num_bytes := words.num_bytes)
        return Packed("raw", num_bytes)

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        """Copy the ``num_bytes`` bytes at the address ``payload`` to ``out``."""
        ctypes.memmove(out.address, payload, num_bytes)
