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
from ...compression.raw import Codec, Packed
from ...compression.registry import codecs_on
from ...compression.zero_value import ZeroValue
from .codecs_peers import Peer
from .codecs_subjects import Subject

Routes = dict[str, Callable[[], Any]]


class Side(NamedTuple):
    """One codec on one tensor: what it makes of it, and what is timed."""

    name: str
    num_bytes: int  # of the payload
    sent_as: str  # the codec that reads it back: another one where this one did not shrink
    routes: Routes
    ours: bool = True


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
    copy to kept memory, and torch's to new memory."""

    def __init__(self, subject: Subject, codecs: Mapping[str, Codec], *, public: bool) -> None:
        self.subject, self.codecs, self.public, tensor = subject, codecs, public, subject.tensor
        bits = min(64, 8 * tensor.itemsize)
        self.words = words = Words(tensor.data_ptr(), tensor.nbytes * 8 // bits, bits, tensor.dtype)
        pool = Pool()
        self.out = pool.take(max(codec.max_bytes(words.num_words, bits) for codec in codecs.values()))
        self.back = pool.take(max(1, tensor.nbytes))
        self.octets = tensor.view(-1).view(torch.uint8)
        to = self.back.data_ptr()
        copy = lambda: ctypes.memmove(to, words.address, words.num_bytes)  # noqa: E731
        self.common: Routes = {"copy": copy, "clone": tensor.clone}

    def ours(self, name: str) -> Side:
        """One of our codecs.

        Raises: AssertionError: a round trip changed a bit, or the kernels and ``encode`` make two payloads.
        """
        tensor, mask = self.subject.tensor, self.subject.mask
        frame = encode(tensor, name, mask=mask)
        header, start = read_header(frame), header_bytes(tensor.dim())
        pack, unpack = self._masked(name, frame, mask) if header.flags else self._plain(name, frame)
        packed = pack()
        assert packed == (header.codec, header.payload_bytes), f"{name} makes two payloads of one tensor"
        assert torch.equal(self.out[: packed.num_bytes], frame[start:]), f"{name} makes two payloads"
        back = decoded(frame, mask)
        self.back.fill_(255)
        unpack()
        wanted = self.octets if mask is None else _where(mask, tensor)
        for made in (back, self.back):
            found = made.view(-1).view(torch.uint8)[: wanted.numel()]
            assert torch.equal(found, wanted), f"{name} changed a bit"
        routes: Routes = {"pack": pack, "unpack": unpack}
        if self.public:
            routes["encode"] = lambda: encode(tensor, name, mask=mask)
            routes["decode"] = lambda: decode(frame, mask=mask)
        return Side(name, packed.num_bytes, packed.codec, routes)

    def theirs(self, peer: Peer) -> Side:
        """One of the others on the same bytes.

        Raises: AssertionError: the round trip changed a bit.
        """
        words = np.frombuffer(self.octets.numpy(), f"u{self.words.bits // 8}")
        packed = peer.pack(words)
        assert peer.unpack(packed, words.nbytes) == words.tobytes(), f"{peer.name} changed a bit"
        unpack = lambda: peer.unpack(packed, words.nbytes)  # noqa: E731
        return Side(
            peer.name, len(packed), peer.name, {"pack": lambda: peer.pack(words), "unpack": unpack}, False
        )

    def _plain(self, name: str, frame: Tensor) -> tuple[Callable[[], Packed], Callable[[], Any]]:
        """Pack and unpack without header and new memory."""
        out, into, header = (
            self.out.data_ptr(),
            self.words._replace(address=self.back.data_ptr()),
            read_header(frame),
        )
        codec, reader, start = self.codecs[name], self.codecs[header.codec], header_bytes(len(header.sizes))
        # An address does not keep its frame, so it is asked each time.
        unpack = lambda: reader.unpack(frame.data_ptr() + start, header.payload_bytes, into)  # noqa: E731
        return lambda: codec.pack(self.words, out), unpack

    def _masked(self, name: str, frame: Tensor, mask: Any) -> tuple[Callable[[], Packed], Callable[[], Any]]:
        """The same at the bitmap of a mask, which is looked up each time, as a stage does."""
        out, into, header = (
            self.out.data_ptr(),
            self.words._replace(address=self.back.data_ptr()),
            read_header(frame),
        )
        inner, reader = (self.codecs.get(codec.partition("+")[2]) for codec in (name, header.codec))
        start, zero_value = header_bytes(len(header.sizes)), self.codecs["zero_value"]
        assert isinstance(zero_value, ZeroValue), "this codec is called so"

        def pack() -> Packed:
            bitmap = bitmap_of(mask, zero_value)
            assert bitmap is not None, "a mask that was used has a bitmap"
            return pack_masked(self.words, bitmap, out, zero_value, inner)

        def unpack() -> None:
            payload, bitmap = frame.data_ptr() + start, bitmap_for(header, mask, zero_value)
            unpack_masked(payload, header.payload_bytes, bitmap, into, zero_value, reader)

        return pack, unpack


def decoded(frame: Tensor, mask: Tensor | None = None) -> Tensor:
    """The tensor of a frame that has one."""
    tensor = decode(frame, mask=mask)
    assert tensor is not None, "this frame carries a tensor"
    return tensor


def _where(mask: Tensor, tensor: Tensor) -> Tensor:
    """The bytes of ``tensor`` with zeros where the mask's tensor is zero."""
    octets, own = (
        one.view(-1).view(torch.uint8).view(-1, tensor.itemsize) for one in (decoded(mask), tensor)
    )
    return (own * (octets != 0).any(1, keepdim=True)).view(-1)
