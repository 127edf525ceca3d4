"""Codecs without frames, on memory that ends at an unreadable page, and the laws of a lossless one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from guarded import guarded
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from penstock.compression.errors import CodecError
from penstock.compression.frame import DTYPE_NUMBERS, MAX_RATIO
from penstock.compression.geometry import Words
from penstock.compression.raw import Codec, Packed

DTYPES = sorted(DTYPE_NUMBERS, key=str)
SIZES = (0, 1, 2, 63, 64, 500, 4095, 4096, 4097, 9001)


def any_tensor(law: Callable[..., Any]) -> Callable[..., Any]:
    """Hold a law of dtypes, size, density and seed: of any, and of every dtype at ``SIZES``."""
    for place, size in enumerate(SIZES):
        law = example(dtypes=DTYPES, size=size, density=(0.4, 0, 1)[place % 3], seed=place)(law)
    densities = st.sampled_from([0, 0.4, 1]) | st.floats(0, 1)
    dtypes, sizes = st.lists(st.sampled_from(DTYPES), min_size=1, max_size=1), st.integers(0, SIZES[-1])
    return given(dtypes=dtypes, size=sizes, density=densities, seed=st.integers(0, 999))(law)


def words_of(tensor: Tensor) -> Words:
    """The words of a contiguous tensor."""
    bits = 8 * min(8, tensor.dtype.itemsize)
    return Words(tensor.data_ptr(), tensor.nbytes * 8 // bits, bits, tensor.dtype)


def memory(tensor: Tensor, before: int = 0) -> Tensor:
    """The bytes of the same words, ending at an unreadable page or ``before`` bytes in front of it."""
    copy = guarded(tensor.nbytes + before)[: tensor.nbytes]
    copy.copy_(tensor.view(-1).view(torch.uint8))
    return copy


def words_in(data: Tensor, like: Tensor) -> Words:
    """The words of a tensor, its bytes being at ``data``."""
    return words_of(like)._replace(address=data.data_ptr())


def packed(codec: Codec, tensor: Tensor, before: int = 0) -> tuple[Packed, Tensor]:
    """The report of ``codec`` on a payload, and the payload; all end ``before`` bytes before such a page."""
    source = memory(tensor, before)  # kept: words do not keep their memory
    words = words_in(source, tensor)
    out = guarded(codec.max_bytes(words.num_words, words.bits) + before)
    found = codec.pack(words, out.data_ptr())
    return found, memory(out[: found.num_bytes], before)


def numbers(payload: Tensor, count: int, first: int = 0) -> list[int]:
    """``count`` u64 of a payload from the byte ``first`` on."""
    return payload[first : first + 8 * count].clone().view(torch.int64).tolist()


def with_number(payload: Tensor, first: int, number: int) -> Tensor:
    """The payload with a u64 at the byte ``first`` replaced."""
    changed = payload.clone()
    changed[first : first + 8] = torch.tensor([number]).view(torch.uint8)
    return memory(changed)


def unpacked(codec: Codec, payload: Tensor, like: Tensor, before: int = 0) -> Tensor:
    """The words of a payload, of the dtype and number of ``like``, in memory that was not clean.

    Raises: CodecError: as the codec.
    """
    back = guarded(like.nbytes + before)[: like.nbytes].fill_(171)
    words = words_in(back, like)
    if not codec.fits(words.num_words, words.bits, len(payload)):
        raise CodecError("it does not fit")
    codec.unpack(payload.data_ptr(), len(payload), words)
    return (back if not before else back.clone()).view(like.dtype)


def random_bits(dtype: torch.dtype, size: int, *, density: float, seed: int = 0) -> Tensor:
    """Random bits, among them -0.0, NaN and denormals; about ``density`` of the words are not zero."""
    rng, item = np.random.default_rng(seed), dtype.itemsize
    items = rng.integers(0, 256, (size, item), dtype=np.uint8)
    items[:, : item - 1] &= rng.integers(0, 256, item - 1, dtype=np.uint8)  # planes of different entropy
    items[rng.random(size) >= density] = 0
    items[1::9] = 0
    items[1::9, -1] = 128
    items[2::31] = 255
    return torch.from_numpy(items).view(-1).view(dtype)


def check_lossless(codec: Codec, others: dict[str, Codec], tensor: Tensor) -> Packed:
    """Law L3 for one tensor: the bits come back, and always from the same payload, never a longer one."""
    found, payload = packed(codec, tensor)
    assert found.num_bytes <= tensor.nbytes
    if found.codec == "raw":
        assert torch.equal(payload, tensor.view(-1).view(torch.uint8))
        return found
    assert tensor.nbytes / MAX_RATIO <= found.num_bytes < tensor.nbytes
    reader = others.get(found.codec, codec)
    assert reader.name == found.codec
    back = unpacked(reader, payload, tensor)
    assert torch.equal(back.view(torch.uint8), tensor.view(-1).view(torch.uint8))
    again, same = packed(codec, tensor)
    assert again == found
    assert torch.equal(same, payload)
    return found


def check_damage(codec: Codec, tensor: Tensor, *, trials: int, first: int = 0, seed: int = 0) -> int:
    """Law L9: a damaged payload gives words or CodecError; returns how many were refused.

    Of the bytes before ``first``, if any, every second trial damages one.
    """
    rng, refused = np.random.default_rng(seed), 0
    found, payload = packed(codec, tensor)
    assert found.codec == codec.name
    for trial in range(trials):
        bad = payload.clone()
        end = first if first and trial % 2 else len(bad)
        place = int(rng.integers(end))
        bad[place : place + int(rng.integers(1, 9))] ^= int(rng.integers(1, 256))
        if trial % 5 == 0:
            bad = bad[: int(rng.integers(len(bad)))]
        if trial % 7 == 0:
            bad = torch.cat([bad, bad[: int(rng.integers(65))]])
        try:
            unpacked(codec, memory(bad), tensor)
        except CodecError:
            refused += 1
    return refused
