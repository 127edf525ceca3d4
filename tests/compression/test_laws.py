"""Laws L3 and L9 of codecs without frames: the words come back, and damage stays within its memory."""

import math

import pytest
import torch
from kernels import on
from payloads import any_tensor, check_damage, check_lossless, packed, random_bits, words_in, words_of

from penstock.compression.byte_plane import BytePlane
from penstock.compression.chained import Combined, ZeroValueLz4
from penstock.compression.exponent import Exponent
from penstock.compression.frame import sections
from penstock.compression.kernels.jit import host_isas
from penstock.compression.lossy import LOSSY_CODECS
from penstock.compression.narrow import Narrow
from penstock.compression.raw import Codec
from penstock.compression.registry import CODECS
from penstock.compression.zero_value import STREAM_BYTES, ZeroValue

NAMES = [*CODECS, "zero_value+narrow"]
HEAD_BYTES = 64
pytestmark = pytest.mark.filterwarnings("ignore:B?Complex.* support is experimental")


def codecs(isa: str) -> dict[str, Codec]:
    zero_value, inner = on(isa, ZeroValue()), (on(isa, Exponent()), on(isa, BytePlane()), on(isa, Narrow()))
    both = (Combined(zero_value, one) for one in inner)  # the last is in no frame, but as any other
    return CODECS | {one.name: one for one in (zero_value, ZeroValueLz4(zero_value), *inner, *both)}


ON = {isa: codecs(isa) for isa in host_isas()}


@pytest.mark.parametrize("name", NAMES)
@any_tensor
def test_words_come_back(name: str, dtypes: list[torch.dtype], size: int, density: float, seed: int) -> None:
    for dtype in dtypes:
        tensor = random_bits(dtype, size, density=density, seed=seed)
        found = {check_lossless(on[name], on, tensor) for on in ON.values()}
        assert len(found) == 1


@pytest.mark.parametrize("isa", ON)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("raw", "exponent")])
def test_damage_stays_within_its_memory(name: str, isa: str) -> None:
    """That of the exponent codec, whose payload has no head, is in ``test_exponent``."""
    heads = dict.fromkeys(("narrow", "byte_plane"), HEAD_BYTES) | {"zero_value+lz4": HEAD_BYTES + 64}
    codec, first, dtypes = ON[isa][name], heads.get(name, sections(9000).values), []
    for dtype in (torch.uint8, torch.bool, torch.uint16, torch.bfloat16, torch.float32, torch.int64):
        tensor = (torch.arange(9000) % 90 * (torch.arange(9000) // 700 % 2)).to(dtype)
        if packed(codec, tensor)[0].codec == name:
            assert check_damage(codec, tensor, trials=120, first=first) > 50
            dtypes.append(dtype)
    assert len(dtypes) > 1


@pytest.mark.parametrize("name", LOSSY_CODECS)
def test_damage_of_lossy_words_stays_within_its_memory(name: str) -> None:
    words = torch.randn(9 * 1024 + 5, generator=torch.Generator().manual_seed(0))
    words[2000] = math.inf
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        if packed(LOSSY_CODECS[name], words.to(dtype))[0].codec == name:
            assert check_damage(LOSSY_CODECS[name], words.to(dtype), trials=200, first=40) > 40


@pytest.mark.parametrize("isa", ON)
@pytest.mark.parametrize("name", ["zero_value", "exponent", "narrow"])
def test_large_words_come_back_past_the_cache_and_through_it(name: str, isa: str) -> None:
    """Past it where they are aligned; the payloads are the same."""
    draw, payloads, codec = torch.Generator().manual_seed(0), [], ON[isa][name]
    tensor = torch.randn(STREAM_BYTES // 4 + 1001, generator=draw)
    tensor = (tensor * 9).int() if name == "narrow" else tensor.relu() if name == "zero_value" else tensor
    words = words_of(tensor)
    for before in (0, 4):
        room = torch.zeros(codec.max_bytes(words.num_words, 32) + 128, dtype=torch.uint8)
        out = room[-room.data_ptr() % 64 + before :]
        found = codec.pack(words, out.data_ptr())
        assert found.codec == name
        payloads.append(out[: found.num_bytes])
        back = torch.full((tensor.nbytes + 128,), 9, dtype=torch.uint8)
        back = back[-back.data_ptr() % 64 + before :][: tensor.nbytes]
        codec.unpack(out.data_ptr(), found.num_bytes, words_in(back, tensor))
        assert torch.equal(back, tensor.view(torch.uint8))
    assert torch.equal(*payloads)
