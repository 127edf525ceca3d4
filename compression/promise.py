"""What a receiver knows of a frame before it comes, and refuses everything else by.

A frame may come from anybody who reaches the port. Its header may be sound in itself and still bring another
tensor than the one that a layer waits for; so it is held against the promise before anything is allocated.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from .errors import CodecError
from .frame import MASKED, Header
from .names import AUTO, lossless

NUMBERS = (torch.bool, torch.int64, torch.float64)


class Promise(NamedTuple):
    """The frame that will come; a tuple, since one is made for every message.

    Any address mod 64 is lawful: it costs 63 bytes at most, and moves no element to another one's place.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...] | None  # None: any that a frame can have, so up to 64 times the tensor's bytes
    codecs: frozenset[str]
    requires_grad: bool = False
    masked: bool = False  # whether it may be values alone, at the set bits of the mask that the reader has
    none: bool = False  # whether a frame of None may come instead
    number: bool = False  # a Python number, whose type may be another than it was
    frozen: bool = False  # whether it may ask for no gradient all the same: it was frozen since

    def hold(self, header: Header) -> None:
        """Raise CodecError unless ``header`` is what was promised."""
        codec, dtype, sizes, strides, _, flags, _, requires_grad, _ = header
        if dtype is None and self.none:
            return
        kept = dtype is self.dtype or (self.number and dtype in NUMBERS)
        kept = kept and sizes == self.sizes and codec in self.codecs
        kept = kept and (strides == self.strides or self.strides is None)
        kept = kept and (requires_grad == self.requires_grad or (self.frozen and not requires_grad))
        if not kept or (flags == MASKED and not self.masked):
            remedy = "give every rank the same model and plan, and let nobody else reach its ports"
            raise CodecError(f"a frame brings what was promised, {self._difference(header)}; {remedy}")

    def _difference(self, header: Header) -> str:
        """The first thing that is not as it was promised."""
        if header.dtype is None:
            return f"a tensor of {self.dtype} and sizes {self.sizes}, found None"
        strides = header.strides if self.strides is None else self.strides
        dtype = header.dtype if self.number and header.dtype in NUMBERS else self.dtype
        asks = self.requires_grad and (header.requires_grad or not self.frozen)
        codec = header.codec if header.codec in self.codecs else " or ".join(sorted(self.codecs))
        for name, promised, found in (
            ("dtype", dtype, header.dtype),
            ("sizes", self.sizes, header.sizes),
            ("strides", strides, header.strides),
            ("codec", codec, header.codec),
            ("requires_grad", asks, header.requires_grad),
        ):
            if promised != found:
                return f"{name} {promised}, found {found}"
        return "all values, found those at the set bits of a mask"


@lru_cache(maxsize=64)
def written_by(codec: str) -> frozenset[str]:
    """The codecs that frames packed with ``codec`` may name: its parts, where a whole does not shrink.

    Under "auto" those are all that lose nothing."""
    if codec == AUTO:
        return frozenset(lossless())
    return frozenset({"raw", codec, *codec.split("+")})
