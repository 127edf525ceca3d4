"""How each codec is called: in kept memory, as a stage does, and by ``encode`` and ``decode``.

Whatever is timed has been checked first: a fast codec that changes a bit is no codec."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...compression.codec import CODECS, decode, encode
from ...compression.frame import header_bytes, read_header
from ...compression.geometry import Words
from ...compression.kernels import cpu
from ...compression.masked import bitmap_for, bitmap_of, has_bitmap, pack_masked, unpack_masked
from ...compression.pool import Pool
from ...compression.raw import Codec
from ...compression.registry import codecs_on
from ...compression.zero_value import ZeroValue
from .codecs_peers import Peer
from .codecs_subjects import Subject

Routes = dict[str, Callable[[], Any]]


class Side(NamedTuple):
    """One codec on one tensor: what a row says of it, and what is timed.

    ``sent_as`` is the codec that reads it back: another one where this one did not shrink."""

    facts: dict[str, Any]
    routes: Routes


def codecs_of(isa: str | None) -> Mapping[str, Codec]:
    """All codecs on the kernels of one instruction set; null: as the library runs them.

    Raises: CodecError: this machine has no such instruction set.
    """
    return CODECS if isa is None else codecs_on(isa, ZeroValue(cpu.build(isa)))


def applies(codec: str, subject: Subject) -> bool:
    """Whether a codec is for tensors of this dtype, and for a mask if there is one."""
    if subject.mask is not None and not has_bitmap(codec):
        return False
    if codec.endswith("exponent"):
        return subject.tensor.dtype in (torch.bfloat16, torch.float32)
    return codec != "narrow" or not subject.tensor.dtype.is_floating_point


class Bench:
    """A tensor, and kept memory that all sides share: where it is packed to, and where it is unpacked to.

    ``public``: whether ``encode`` and ``decode`` are timed too. ``common``: what all are compared with, a
    copy to kept memory and one to new memory."""

    def __init__(self, subject: Subject, codecs: Mapping[str, Codec], *, public: bool) -> None:
        self.subject, self.codecs, self.public, tensor = subject, codecs, public, subject.tensor
        bits = min(64, 8 * tensor.itemsize)
        self.words = words = Words(tensor.data_ptr(), tensor.nbytes * 8 // bits, bits, tensor.dtype)
        pool = Pool()
        self.out = pool.take(max(codec.max_bytes(words.num_words, bits) for codec in codecs.values()))
        self.back = pool.take(max(1, tensor.nbytes))
        self.octets, to = _octets(tensor), self.back.data_ptr()
        copy = lambda: ctypes.memmove(to, words.address, words.num_bytes)  # noqa: E731
        self.common: Routes = {"copy": copy, "clone": tensor.clone}

    def ours(self, name: str) -> Side:
        """One of our codecs.

        Raises: AssertionError: a round trip changed a bit, or the kernels and ``encode`` make two payloads.
        """
        tensor, mask = self.subject.tensor, self.subject.mask
        frame = encode(tensor, name, mask=mask)
        header, start = read_header(frame), header_bytes(tensor.dim())
        routes = self._kept(name, frame)
        packed = routes["pack"]()
        assert packed == (header.codec, header.payload_bytes), f"{name} makes two payloads of one tensor"
        assert torch.equal(self.out[: packed.num_bytes], frame[start:]), f"{name} makes two payloads"
        self.back.fill_(255)
        routes["unpack"]()
        wanted = self.octets
        if mask is not None:  # zeros where the mask's tensor is zero
            chosen = (_octets(decoded(mask)).view(-1, tensor.itemsize) != 0).any(1, keepdim=True)
            wanted = (wanted.view(-1, tensor.itemsize) * chosen).view(-1)
        for made in (_octets(decoded(frame, mask)), self.back[: len(wanted)]):
            assert torch.equal(made, wanted), f"{name} changed a bit"
        if self.public:
            routes["encode"] = lambda: encode(tensor, name, mask=mask)
            routes["decode"] = lambda: decode(frame, mask=mask)
        return self._side(name, packed.num_bytes, packed.codec, routes)

    def theirs(self, peer: Peer) -> Side:
        """One of the others on the same bytes.

        Raises: AssertionError: the round trip changed a bit.
        """
        words = np.frombuffer(self.octets.numpy(), f"u{self.words.bits // 8}")
        packed = peer.pack(words)
        assert peer.unpack(packed, words.nbytes) == words.tobytes(), f"{peer.name} changed a bit"
        routes = {"pack": lambda: peer.pack(words), "unpack": lambda: peer.unpack(packed, words.nbytes)}
        return self._side(peer.name, len(packed), peer.name, routes)

    def _side(self, name: str, num_bytes: int, sent_as: str, routes: Routes) -> Side:
        ratio = self.subject.tensor.nbytes / max(1, num_bytes)
        return Side({"codec": name, "sent_as": sent_as, "ratio": ratio}, routes)

    def _kept(self, name: str, frame: Tensor) -> Routes:
        """Pack and unpack without header and new memory; at the bitmap of a mask where the frame used one.

        The bitmap is looked up each time, as a stage does."""
        header, out, words = read_header(frame), self.out.data_ptr(), self.words
        into = words._replace(address=self.back.data_ptr())
        # An address does not keep its frame, so it is asked each time.
        start, num_bytes = header_bytes(len(header.sizes)), header.payload_bytes
        codec, reader = self.codecs[name], self.codecs[header.codec]
        if not header.flags:
            return {
                "pack": lambda: codec.pack(words, out),
                "unpack": lambda: reader.unpack(frame.data_ptr() + start, num_bytes, into),
            }
        mask, zero_value = self.subject.mask, self.codecs["zero_value"]
        assert isinstance(zero_value, ZeroValue), "this codec is called so"
        inner, outer = (self.codecs.get(codec.partition("+")[2]) for codec in (name, header.codec))

        def pack() -> Any:
            bitmap = None if mask is None else bitmap_of(mask, zero_value)
            assert bitmap is not None, "a mask that was used has a bitmap"
            return pack_masked(words, bitmap, out, zero_value, inner)

        def unpack() -> None:
            bitmap = bitmap_for(header, mask, zero_value)
            unpack_masked(frame.data_ptr() + start, num_bytes, bitmap, into, zero_value, outer)

        return {"pack": pack, "unpack": unpack}


def decoded(frame: Tensor, mask: Tensor | None = None) -> Tensor:
    """The tensor of a frame that has one."""
    tensor = decode(frame, mask=mask)
    assert tensor is not None, "this frame carries a tensor"
    return tensor


def _octets(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
