"""A sample as bytes, and back: exactly what its data set returned, or no bytes at all.

Only what is sure to come back the same is taken: plain tensors of the host, arrays, numbers, strings, bytes,
plain images, and tuples, lists and dicts of them. The bytes are a header in JSON and buffers, never code."""

import json
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ....compression.codec import decode, encode
from ....compression.errors import CodecError, PenstockError
from ....stages.device import CPU

_LENGTH = struct.Struct("<I")
_EVERY = 64  # bytes: buffers begin at a multiple of so many
_PLAIN = (bool, int, float, str, type(None))


def to_bytes(sample: Any) -> bytes | None:
    """Return the bytes of a sample; None where it holds what might come back otherwise."""
    buffers = list[bytes]()
    try:
        header = json.dumps(_describe(sample, buffers), allow_nan=False).encode()
    except (_NotPlain, ValueError, CodecError):
        return None
    at, parts = _LENGTH.size + len(header), [_LENGTH.pack(len(header)), header]
    for buffer in buffers:
        gap = -at % _EVERY
        parts += [bytes(gap), buffer]
        at += gap + len(buffer)
    return b"".join(parts)


def from_bytes(data: bytes) -> Any:
    """Return the sample that ``to_bytes`` was given; raises PenstockError for the bytes of none."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        end = _LENGTH.size + length
        return _restore(json.loads(data[_LENGTH.size : end]), _Buffers(data, end))
    except PenstockError:
        raise
    except Exception as error:
        raise PenstockError(f"the bytes are those of no sample ({type(error).__name__}: {error})") from error


class _NotPlain(Exception): ...


class _Buffers:
    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = memoryview(data), at

    def next(self, length: int) -> memoryview:
        start = self._at + -self._at % _EVERY
        self._at = start + length
        if length < 0 or self._at > len(self._data):
            raise PenstockError("the bytes of a sample end too early")
        return self._data[start : self._at]


def _describe(item: Any, buffers: list[bytes]) -> Any:
    """Header of an item: [kind, description]."""
    kind = type(item)
    if kind is float and not np.isfinite(item):
        return ["number", item.hex()]
    if kind in _PLAIN:
        return ["plain", item]
    if kind in (tuple, list):
        return [kind.__name__, [_describe(one, buffers) for one in item]]
    if kind is dict:
        if not all(type(name) is str for name in item):
            raise _NotPlain
        return ["dict", [[name, _describe(one, buffers)] for name, one in item.items()]]
    if kind is bytes:
        return ["bytes", _append(item, buffers)]
    if kind is torch.Tensor:
        return ["tensor", _append(_frame(item), buffers)]
    if kind is np.ndarray:
        if item.dtype.kind not in "biufc" or not item.flags.c_contiguous or item.dtype.byteorder == ">":
            raise _NotPlain
        return ["array", item.dtype.str, list(item.shape), _append(item.tobytes(), buffers)]
    module = sys.modules.get("PIL.Image")
    if module is not None and kind is module.Image and not item.info and item.palette is None:
        return ["image", item.mode, list(item.size), _append(item.tobytes(), buffers)]
    if isinstance(item, np.generic) and item.dtype.kind in "biufc":
        return ["scalar", item.dtype.str, _append(item.tobytes(), buffers)]
    raise _NotPlain


def _restore(description: Sequence[Any], buffers: _Buffers) -> Any:
    kind, *known = description
    if kind == "plain":
        return known[0]
    if kind == "number":
        return float.fromhex(known[0])
    if kind in ("tuple", "list"):
        items = [_restore(one, buffers) for one in known[0]]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {name: _restore(one, buffers) for name, one in known[0]}
    if kind == "bytes":
        return bytes(buffers.next(known[0]))
    if kind == "tensor":
        return decode(torch.frombuffer(bytearray(buffers.next(known[0])), dtype=torch.uint8))
    if kind == "array":
        dtype, shape, length = known
        return np.frombuffer(bytearray(buffers.next(length)), dtype=dtype).reshape(shape)
    if kind == "scalar":
        dtype, length = known
        return np.frombuffer(buffers.next(length), dtype=dtype)[0]
    if kind == "image":
        from PIL.Image import frombytes

        mode, size, length = known
        return frombytes(mode, tuple(size), bytes(buffers.next(length)))
    raise PenstockError(f"there is no kind of sample {kind!r}")


def _append(data: bytes, buffers: list[bytes]) -> int:
    buffers.append(data)
    return len(data)


def _frame(tensor: torch.Tensor) -> bytes:
    plain = tensor.layout is torch.strided and tensor.device == CPU and not tensor.requires_grad
    if not plain or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
        raise _NotPlain
    frame = encode(tensor, codec="raw")
    if (back := decode(frame)) is None or back.stride() != tensor.stride():  # overlapping, or far apart
        raise _NotPlain
    return frame.numpy().tobytes()
