"""Lossy codecs: each within the bound of its docstring, the rest raw, NaN and infinities as stated."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from payloads import DTYPES, memory, packed, random_bits, unpacked
from reference import same_bits
from torch import Tensor

from penstock.compression.codec import CODECS
from penstock.compression.errors import CodecError
from penstock.compression.frame import aligned
from penstock.compression.lossy import BLOCK, LOSSY_CODECS
from penstock.compression.names import CODEC_NAMES

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
pytestmark = pytest.mark.filterwarnings("ignore:B?Complex.* support is experimental")


def spread(dtype: torch.dtype, seed: int = 0, size: int = 5000) -> Tensor:
    """Normal words times a power of two per block, over all that the dtype holds."""
    rng, info = np.random.default_rng(seed), torch.finfo(dtype)
    low, high = math.log2(info.smallest_normal) - 5, math.log2(info.max) - 3
    powers = np.repeat(rng.uniform(low, high, -(-size // BLOCK)), BLOCK)[:size]
    words = torch.from_numpy(rng.standard_normal(size) * 2.0**powers)
    words[::50] = 0
    words[1::50] = -0.0
    return words.clamp(-info.max, info.max).to(dtype)


def back_of(name: str, tensor: Tensor) -> Tensor:
    codec = LOSSY_CODECS[name]
    found, payload = packed(codec, tensor)
    assert found.codec == name
    assert found.num_bytes < tensor.nbytes
    assert torch.equal(packed(codec, tensor)[1], payload)
    return unpacked(codec, payload, tensor).clone()


def test_they_are_listed_apart() -> None:
    assert not set(LOSSY_CODECS) & set(CODECS)
    assert set(LOSSY_CODECS) <= set(CODEC_NAMES)
    assert all("Error: " in (type(codec).__doc__ or "") for codec in LOSSY_CODECS.values())


@pytest.mark.parametrize("name", LOSSY_CODECS)
def test_what_they_do_not_apply_to_goes_raw(name: str) -> None:
    for dtype in DTYPES:
        applies = dtype in FLOATS and (name != "bf16" or dtype.itemsize > 2)
        for size in (0, 1, 100, 5000):
            tensor = random_bits(dtype, size, density=0.5)
            found, payload = packed(LOSSY_CODECS[name], tensor)
            assert found.num_bytes <= tensor.nbytes
            if found.codec == "raw":
                assert not applies or size < 5000 or name != "bf16"
                assert same_bits(payload, tensor.view(-1).view(torch.uint8))
            else:
                assert applies
                assert len(unpacked(LOSSY_CODECS[name], payload, tensor)) == size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@given(seed=st.integers(0, 999))
def test_bf16_is_within_its_bound(dtype: torch.dtype, seed: int) -> None:
    words = spread(dtype, seed)
    words = words[words.abs() < 2.0**128 - 2.0**119]
    back = back_of("bf16", words).double()
    error = (back - words.double()).abs()
    bound = torch.where(words.abs() >= 2.0**-126, words.double().abs() * 2.0**-8, 2.0**-134)
    assert (error <= bound).all()
    assert torch.equal(back.signbit(), words.signbit())


def test_bf16_is_torchs_own_rounding_where_that_rounds_once() -> None:
    words = random_bits(torch.float32, 1 << 16, density=1)
    words = words[~words.isnan()]
    assert same_bits(back_of("bf16", words), words.bfloat16().float())


def test_bf16_rounds_float64_once() -> None:
    """One unit of float64 beside a tie of bfloat16: by way of float32 all of them would end on the tie."""
    ties = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 5 * 2.0**-134], dtype=torch.float64)
    up, down = torch.nextafter(ties, ties * 2), torch.nextafter(ties, ties * 0)
    step = torch.tensor([2.0**-7, 2.0**-7, -(2.0**-7), 2.0**-133], dtype=torch.float64)
    assert torch.equal(back_of("bf16", up), ties + step / 2)
    assert torch.equal(back_of("bf16", down), ties - step / 2)
    even = torch.tensor([1, 1 + 2.0**-6, -1, 2.0**-132], dtype=torch.float64)
    assert torch.equal(back_of("bf16", ties), even)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bf16_keeps_infinities_and_nan(dtype: torch.dtype) -> None:
    most = 2.0**128 - 2.0**119
    words = torch.tensor([math.inf, -math.inf, most, -most, 0, -0.0], dtype=dtype)
    expected = torch.tensor([math.inf, -math.inf, math.inf, -math.inf, 0, -0.0], dtype=dtype)
    assert same_bits(back_of("bf16", words), expected)
    quiet, integer = (1 << 22, torch.int32) if dtype is torch.float32 else (1 << 51, torch.int64)
    one = torch.tensor([math.inf, -math.inf], dtype=dtype).view(integer) | 1  # a NaN by its last bit alone
    for nan in (one, one | quiet, one | (quiet >> 1)):
        assert back_of("bf16", nan.view(dtype)).isnan().all()


def largest_of(words: Tensor) -> Tensor:
    """The largest absolute value of each word's block, in float64."""
    wide = words.double().abs()
    return torch.cat([block.amax().expand(len(block)) for block in wide.split(BLOCK)])


def rounding_of(words: Tensor) -> Tensor:
    """Half a unit in the last place of the word's dtype, or a bit more."""
    info = torch.finfo(words.dtype)
    return (words.double().abs() * info.eps).clamp(min=info.smallest_normal * info.eps)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@given(seed=st.integers(0, 999))
def test_fp8_and_int8_are_within_their_bounds(dtype: torch.dtype, seed: int) -> None:
    words = spread(dtype, seed)
    wide, largest = words.double(), largest_of(words)
    assume(packed(LOSSY_CODECS["fp8"], words)[0].codec == "fp8")  # of float64 most blocks may lie beyond it
    fp8, int8 = back_of("fp8", words), back_of("int8", words)
    scale = (largest / 224).clamp(min=2.0**-126)
    bound = torch.maximum(wide.abs() * (2.0**-4 + 2.0**-24), scale * 2.0**-10) + rounding_of(fp8)
    assert ((fp8.double() - wide).abs() <= bound).all()
    assert torch.equal(fp8.signbit(), words.signbit())
    bound = (largest / 254).clamp(min=2.0**-127) * (1 + 2.0**-14) + rounding_of(int8)
    assert ((int8.double() - wide).abs() <= bound).all()
    assert fp8.isfinite().all()
    assert int8.isfinite().all()


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_the_largest_word_of_a_dtype_stays_finite(name: str) -> None:
    for dtype in FLOATS[:3]:
        words = torch.full((2048,), torch.finfo(dtype).max, dtype=dtype)
        words[1] = -words[1]
        back = back_of(name, words)
        assert back.isfinite().all()
        assert torch.equal(back.sign(), words.sign())


def test_fp8_codes_are_the_nearest_of_all_codes() -> None:
    """The slow twin: every code's value, and the nearest to each word, ties to the even code."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    words = torch.linspace(0, 448, 8192, dtype=torch.float32)
    words[BLOCK - 1 :: BLOCK] = 448  # a scale of one
    back = back_of("fp8", words).double()
    distance = (values[None] - words.double()[:, None]).abs()
    nearest = distance.amin(1, keepdim=True)
    code = (distance == nearest).int().mul(torch.arange(127) % 2 * -1 + 2).argmax(1)
    assert torch.equal(back, values[code])


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_blocks_that_are_not_finite_travel_as_they_are(name: str, dtype: torch.dtype) -> None:
    for bad in (math.inf, -math.inf, math.nan):
        words = torch.randn(20 * BLOCK + 100, generator=torch.Generator().manual_seed(0)).to(dtype)
        words[5 * BLOCK + 7], words[-1] = bad, bad
        found, payload = packed(LOSSY_CODECS[name], words)
        plain = aligned(4 * 21) + aligned(len(words))
        assert found == (name, plain + (BLOCK + 100) * dtype.itemsize)
        back = unpacked(LOSSY_CODECS[name], payload, words)
        for block in (5, 20):
            part = slice(block * BLOCK, (block + 1) * BLOCK)
            assert same_bits(back[part], words[part])
        assert (back[:BLOCK] != words[:BLOCK]).any()
    assert packed(LOSSY_CODECS[name], words * math.nan)[0].codec == "raw"
    words = torch.ones(4 * BLOCK, dtype=torch.float64)
    words[0] = 1e300  # beyond any scale
    back = back_of(name, words)
    assert same_bits(back[:BLOCK], words[:BLOCK])
    assert (back[BLOCK:] - 1).abs().max() < 1e-6


def test_what_a_payload_cannot_be_is_refused() -> None:
    words = torch.randn(5000)
    for codec in LOSSY_CODECS.values():
        with pytest.raises(CodecError, match=r"found torch\.int32"):
            unpacked(codec, packed(codec, words)[1], torch.zeros(5000, dtype=torch.int32))
    for scale in (0.0, -1.0, math.inf, 2.0**-127):
        payload = packed(LOSSY_CODECS["int8"], words)[1]
        payload[4:8] = torch.tensor([scale]).view(torch.uint8)
        with pytest.raises(CodecError, match="has a scale"):
            unpacked(LOSSY_CODECS["int8"], memory(payload), words)
