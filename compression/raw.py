"""The base of codecs, and the one that copies: for what does not shrink, and to compare others with."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch

from .frame import FLOATS, OTHERS
from .geometry import Words
from .kernels.jit import kernels


class Packed(NamedTuple):
    """The codec that reads a payload back (raw where nothing shrank), and the payload's bytes."""

    codec: str
    num_bytes: int


class Codec(ABC):
    """One way to write words; addresses are integers."""

    name: str
    dtypes: frozenset[torch.dtype]
    """Those on which ``codec=auto`` tries it; it may be asked for any by name."""

    @cached_property
    def _kernels(self) -> Mapping[str, Callable[..., int]]:
        return kernels(self.name)

    def kernel(self, name: str) -> Callable[..., int]:
        """Return the compiled function ``name``, built at the first use."""
        return self._kernels[name]

    def max_bytes(self, num_words: int, bits: int) -> int:
        """Return the bytes that ``pack`` needs at ``out``: those of the words, should they go raw."""
        return num_words * bits // 8

    @abstractmethod
    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        """Return whether a payload of ``num_bytes`` can hold these words; asked before memory is taken."""

    @abstractmethod
    def pack(self, words: Words, out: int) -> Packed:
        """Write the payload of ``words`` to the address ``out``, never longer than the words themselves."""

    @abstractmethod
    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        """Read a payload of a length that ``fits`` to ``out``, and touch nothing else; raise CodecError if it
        contradicts itself, and nothing else ever."""


class Raw(Codec):
    """The words as they are."""

    name, dtypes = "raw", FLOATS | OTHERS

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        return num_bytes == num_words * bits // 8

    def pack(self, words: Words, out: int) -> Packed:
        ctypes.memmove(out, words.address, num_bytes := words.num_bytes)
        return Packed("raw", num_bytes)

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        ctypes.memmove(out.address, payload, num_bytes)
