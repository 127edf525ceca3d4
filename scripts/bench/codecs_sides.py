"""How each codec is called: in kept memory, as a stage does, and by ``encode`` and ``decode``.

Whatever is timed has been checked first: a fast codec that changes a bit is no codec."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...compression.byte_plane import BytePlane
from ...compression.codec import CODECS, decode, encode
from ...compression.combined import Combined
from ...compression.exponent import Exponent
from ...compression.frame import header_bytes, read_header
from ...compression.geometry import Words
from ...compression.kernels import cpu, exponent_cpu
from ...compression.lz import ZeroValueLz4
from ...compression.masked import bitmap_for, bitmap_of, has_bitmap, pack_masked, unpack_masked
from ...compression.narrow import Narrow
from ...compression.pool import Pool
from ...compression.raw import Codec, Packed, Raw
from ...compression.zero_value import ZeroValue
from .codecs_peers import Peer
from .codecs_subjects import Subject

Routes = dict[str, Callable[[], Any]]
_FLOATS = {torch.bfloat16, torch.float32}


class Side(NamedTuple):
    """One codec on one tensor: what it makes of it, and what is timed."""

    num_bytes: int  # of the payload
    sent_as: str  # the codec that reads it back: another one where this one did not shrink
    routes: Routes


def codecs_of(isa: str | None) -> Mapping[str, Codec]:
    """All codecs on the kernels of one instruction set; null: as the library runs them.

    Raises: CodecError: this machine has no such instruction set.
    """
    if isa is None:
        return CODECS
    zero_value, exponent = ZeroValue(cpu.build(isa)), Exponent(exponent_cpu.build(isa))
    byte_plane = BytePlane(isa)
    combined = Combined(zero_value, exponent), Combined(zero_value, byte_plane)
    simple = Raw(), zero_value, ZeroValueLz4(zero_value), exponent, byte_plane, Narrow(isa)
    return {codec.name: codec for codec in (*simple, *combined)}


def applies(codec: str, subject: Subject) -> bool:
    """Whether a codec is for tensors of this dtype, and for a mask if there is one."""
    if subject.mask is not None and not has_bitmap(codec):
        return False
    if codec.endswith("exponent"):
        return subject.tensor.dtype in _FLOATS
    return codec != "narrow" or not subject.tensor.dtype.is_floating_point


class Memory:
    """Kept memory that all sides of a tensor share: where it is packed to, and where it is unpacked to."""

    def __init__(self, subject: Subject, codecs: Mapping[str, Codec]) -> None:
        tensor = subject.tensor
        self.words = Words(
            tensor.data_ptr(),
            tensor.nbytes * 8 // min(64, 8 * tensor.itemsize),
            min(64, 8 * tensor.itemsize),
            tensor.dtype,
        )
        sizes = (codec.max_bytes(self.words.num_words, self.words.bits) for codec in codecs.values())
        pool = Pool()
        self.out, self.back = pool.take(max(sizes)), pool.take(max(1, tensor.nbytes))
        self.octets = tensor.view(-1).view(torch.uint8)
        self.wanted = self.octets

    def check(self, made: Tensor, name: str) -> None:
        """Raise AssertionError unless ``made`` has the bits that are wanted."""
        found = made.view(-1).view(torch.uint8)[: self.octets.numel()]
        assert torch.equal(found, self.wanted), f"{name} changed a bit"


def common(memory: Memory, subject: Subject) -> Routes:
    """What the others are compared with: a copy to kept memory, and torch's copy to new memory."""
    out, words = memory.back.data_ptr(), memory.words
    return {
        "copy": lambda: ctypes.memmove(out, words.address, words.num_bytes),
        "clone": lambda: subject.tensor.clone(),
    }


def ours(subject: Subject, name: str, memory: Memory, codecs: Mapping[str, Codec], *, public: bool) -> Side:
    """One of our codecs; ``encode`` and ``decode`` are among the routes if ``public``.

    Raises: AssertionError: a round trip changed a bit, or the kernels and ``encode`` make two payloads.
    """
    tensor, mask = subject.tensor, subject.mask
    frame = encode(tensor, name, mask=mask)
    header, start = read_header(frame), header_bytes(tensor.dim())
    pack, unpack = _kernels(subject, name, memory, codecs, frame)
    packed = pack()
    assert packed == (header.codec, header.payload_bytes), f"{name} makes two payloads of one tensor"
    assert torch.equal(memory.out[: packed.num_bytes], frame[start:]), f"{name} makes two payloads"
    back = decode(frame, mask=mask)
    assert back is not None, "this frame carries a tensor"
    memory.wanted = memory.octets if mask is None else _masked(subject)
    memory.check(back, name)
    memory.back.fill_(255)
    unpack()
    memory.check(memory.back, name)
    routes: Routes = {"pack": pack, "unpack": unpack}
    if public:
        routes |= {
            "encode": lambda: encode(tensor, name, mask=mask),
            "decode": lambda: decode(frame, mask=mask),
        }
    return Side(packed.num_bytes, packed.codec, routes)


def _kernels(
    subject: Subject, name: str, memory: Memory, codecs: Mapping[str, Codec], frame: Tensor
) -> tuple[Callable[[], Packed], Callable[[], Any]]:
    """Pack and unpack without header and new memory."""
    words, out = memory.words, memory.out.data_ptr()
    into, header = words._replace(address=memory.back.data_ptr()), read_header(frame)
    payload, num_bytes = frame.data_ptr() + header_bytes(subject.tensor.dim()), header.payload_bytes
    if not header.flags:
        reader = codecs[header.codec]
        # An address does not keep its frame, a default does.
        return (
            lambda: codecs[name].pack(words, out),
            lambda frame=frame: reader.unpack(payload, num_bytes, into),
        )
    zero_value, mask = codecs["zero_value"], subject.mask
    assert isinstance(zero_value, ZeroValue), "this codec is called so"
    assert mask is not None, "this frame was made with a mask"
    inner, reader = (codecs.get(codec.partition("+")[2]) for codec in (name, header.codec))

    def pack() -> Packed:
        bitmap = bitmap_of(mask, zero_value)
        assert bitmap is not None, "a mask that was used has a bitmap"
        return pack_masked(words, bitmap, out, zero_value, inner)

    def unpack(frame: Tensor = frame) -> None:
        unpack_masked(payload, num_bytes, bitmap_for(header, mask, zero_value), into, zero_value, reader)

    return pack, unpack


def theirs(peer: Peer, subject: Subject, memory: Memory) -> Side:
    """One of the others on the same bytes.

    Raises: AssertionError: the round trip changed a bit.
    """
    words = np.frombuffer(memory.octets.numpy(), f"u{min(8, subject.tensor.itemsize)}")
    packed = peer.pack(words)
    assert peer.unpack(packed, words.nbytes) == words.tobytes(), f"{peer.name} changed a bit"
    routes: Routes = {
        "pack": lambda: peer.pack(words),
        "unpack": lambda: peer.unpack(packed, words.nbytes),
    }
    return Side(len(packed), peer.name, routes)


def _masked(subject: Subject) -> Tensor:
    """The bytes of the tensor with zeros where the mask's tensor is zero."""
    assert subject.mask is not None, "asked only where there is a mask"
    kept = decode(subject.mask)
    assert kept is not None, "a mask is the frame of a tensor"
    octets = kept.view(-1).view(torch.uint8).view(-1, kept.itemsize)
    own = subject.tensor.view(-1).view(torch.uint8).view(-1, kept.itemsize)
    return (own * (octets != 0).any(1, keepdim=True)).view(-1)
