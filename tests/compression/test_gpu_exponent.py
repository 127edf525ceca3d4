"""The exponent codec on a GPU, alone and behind zero_value: the CPU's bytes and plans, and damage."""

import random
from itertools import product
from typing import NamedTuple

import pytest
import torch
from gpus import INTERPRETED, assert_law, compile_all
from guarded import guarded
from torch import Tensor

from penstock.compression.codec import encode
from penstock.compression.errors import CodecError
from penstock.compression.exponent import Exponent, layout
from penstock.compression.frame import BLOCK, MASKED, Header, frame_bytes, header_bytes, read_header, sections
from penstock.compression.geometry import Words
from penstock.compression.gpu import frames
from penstock.compression.kernels.exponent_ir import PLANS
from penstock.compression.registry import codec_named
from penstock.compression.zero_value import unpack_masked

pytest.importorskip("triton")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BOTH = "zero_value+exponent"
ROUNDS, NUM_WORDS = 24 if INTERPRETED else 2000, BLOCK + 1536
SIZES = (0, 1, 1023, 1024, 1025, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1501)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing; a process without it does")
@pytest.mark.parametrize("bits", [16, 32])
def test_kernels_compile_where_there_is_no_gpu(bits, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    bytes_at = ("payload", "book", "codes2", "codes3", "escapes")
    integers_at = ("state", "facts", "heads", "lengths", "ends", "numbers")
    types = dict.fromkeys(("words", "as_they_are", "out"), f"*i{bits}") | {"error": "*i32"}
    types |= dict.fromkeys(bytes_at, "*u8") | dict.fromkeys(integers_at, "*i64")
    constants = {"BITS": bits, "RUNS": 128, "SHORTEST": 1024, "PERCENT": 102}
    compile_all("exponent", ["choose_plan"], types, constants)
    compile_all("exponent", ["list_escapes", "write_words"], types, constants)
    compile_all("exponent", ["restore_words"], types, constants)
    for level in (3, 2):
        own = types | {"out": "*u8"}
        compile_all("exponent", ["restore_escapes"], own, constants | {"LEVEL": level})


def normal(num_words: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(num_words, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_bits(num_words: int, dtype: torch.dtype) -> Tensor:
    num_bytes, source = num_words * dtype.itemsize, torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=source).view(dtype)


def integers(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def payload_of(frame: Tensor) -> Tensor:
    return frame[header_bytes(len(read_header(frame).sizes)) :]


@every_dtype
@pytest.mark.parametrize("sizes", [(1023, BLOCK + 1), pytest.param(SIZES, marks=pytest.mark.slow)])
def test_any_number_of_words(dtype: torch.dtype, sizes: tuple[int, ...], device: str) -> None:
    frames = [assert_law(normal(num_words, dtype), device, "exponent") for num_words in sizes]
    assert {read_header(frame).codec for frame in frames} == {"raw", "exponent"}


@pytest.mark.slow
@every_dtype
def test_every_plan_and_every_bit(dtype: torch.dtype, device: str) -> None:
    """Few exponents and many, special numbers with any bits, and what no plan shortens."""
    plans, num_words, bits = set(), BLOCK + 333, 8 * dtype.itemsize
    words = random_bits(num_words, dtype)
    few = integers(words) & (1 << (bits - 8)) - 1  # small denormals
    some = [integers(words) & (2 << (bits - 8 + n)) - 1 | 1 << (bits - 2) for n in (0, 1, 2)]
    some.append(integers(words) & (1 << (bits - 9)) - 1 | torch.arange(num_words) % 3 << (bits - 9))
    seldom = torch.where(torch.arange(num_words) % 16 == 0, integers(words), few)
    special = integers(words) | ~((1 << (bits - 9)) - 1) & (1 << (bits - 1)) - 1  # infinities and NaN
    tensors = [torch.zeros(num_words, dtype=dtype), torch.full((num_words,), -1.5, dtype=dtype), words]
    tensors += [x.to(few.dtype).view(dtype) for x in (few, *some, seldom, special)]
    one, other = normal(num_words, torch.float32), normal(num_words, torch.float32, 1).exp()
    for tensor in (*tensors, (one * other).to(dtype), (one * other**4).to(dtype)):
        frame = assert_law(tensor, device, "exponent")
        if read_header(frame).codec == "exponent":
            plans.add(tuple(payload_of(frame)[:3].tolist()))
    assert plans == set(PLANS)


@pytest.mark.slow
@every_dtype
def test_a_sample_that_misleads_is_found_out(dtype: torch.dtype, device: str) -> None:
    """Noise but for the runs that are counted; a part is no noise, and so much of it that it pays again."""
    codecs, num_words = [], 1 << 16
    for quiet in (0, num_words // 2, num_words // 8 * 7):
        words = integers(random_bits(num_words, dtype))
        words[:quiet] = 1
        for run in range(128):
            place = (run * 0x9E3779B97F4A7C15 % (1 << 64)) * (num_words - 63) >> 64
            words[place : place + 64] = 1
        codecs.append(read_header(assert_law(words.view(dtype), device, "exponent")).codec)
    assert (codecs[0], codecs[-1]) == ("raw", "exponent")


@pytest.mark.slow
@every_dtype
def test_behind_zero_value_either_may_be_alone(dtype: torch.dtype, device: str) -> None:
    codecs, num_words = set(), BLOCK + 1501
    dense, noise = normal(num_words, dtype), random_bits(num_words, dtype)
    shuffled = torch.rand(num_words, generator=torch.Generator().manual_seed(2))
    for values, density in product((dense, noise), (0, 0.1, 0.5, 1)):
        tensor = torch.where(shuffled < density, values, torch.zeros_like(values))
        codecs.add(read_header(assert_law(tensor, device, BOTH)).codec)
    assert codecs == {"raw", "zero_value", "exponent", BOTH}
    for few in (0, 1, 64, 1000, 1500):
        assert_law(dense[:few].relu(), device, BOTH)
    # of a long one zero_value gives up on a sample: values are packed as they are, in the bitmap's place
    assert read_header(assert_law(normal(64 * BLOCK + 99, dtype), device, BOTH)).codec == "exponent"


@every_dtype
def test_values_at_the_set_bits_of_a_mask(dtype: torch.dtype, device: str) -> None:
    codecs, num_words = set(), BLOCK + 1501
    for values, share in product((normal(num_words, dtype), random_bits(num_words, dtype)), (0.05, 0.6)):
        kept = torch.rand(num_words, generator=torch.Generator().manual_seed(3)) < share
        header = read_header(assert_law(values, device, BOTH, mask=encode(kept.to(dtype))))
        assert header.flags == MASKED
        codecs.add(header.codec)
    assert codecs == {"zero_value", BOTH}


def judged(header: Header, payload: Tensor, mask: int | None, out: Tensor) -> bool:
    """Return whether the CPU takes a payload; ``out`` is its result."""
    assert header.dtype is not None
    words = Words(out.data_ptr(), out.numel(), 8 * out.element_size(), header.dtype)
    try:
        if mask is not None:
            unpack_masked(payload.data_ptr(), len(payload), mask, words, Exponent())
        else:
            codec_named(header.codec).unpack(payload.data_ptr(), len(payload), words)
    except CodecError:
        return False
    return True


def places_to_damage(payload: Tensor, num_words: int, start: int, bits: int) -> list[range]:
    """Places of numbers that others rely on, in an exponent payload from byte ``start``, and all of it."""
    if not num_words:  # of zero_value alone: its bitmap, its offsets, and all of it
        return [range(sections(NUM_WORDS).offsets), range(sections(NUM_WORDS).values), range(len(payload))]
    parts = layout(num_words, bits, int(payload[start]))
    tail, whole_blocks = start + parts.tail, 8 * (num_words // BLOCK)
    last = tail + int(payload[start + parts.offsets :][:whole_blocks].view(torch.int64)[-1:].sum())
    numbers = (start, start + 16), (start + parts.offsets, tail), (tail, tail + 8), (last, last + 8)
    codes = (start + 64, start + parts.codes_end), (tail, len(payload)), (last, len(payload))
    return [range(*ends) for ends in (*numbers, *codes, (0, max(start, 64)), (0, len(payload)))]


class Sample(NamedTuple):
    """A frame to damage, and what it was made with."""

    frame: Tensor
    mask: Tensor | None
    start: int = 0  # of the exponent payload in the payload
    num_words: int = 0  # in that


def sample(codec: str, dtype: torch.dtype, num_words: int, seed: int) -> Sample:
    tensor = normal(num_words, dtype, seed)
    if codec == "exponent":
        return Sample(encode(tensor, codec), None, 0, num_words)
    sparse = tensor.relu()
    if codec == "zero_value":
        return Sample(encode(sparse, codec), None)
    frame, count = encode(sparse, BOTH), int((sparse != 0).sum())
    if codec == BOTH:
        return Sample(frame, None, sections(num_words).values, count)
    return Sample(encode(tensor.roll(1), BOTH, mask=frame), frame, 0, count)


@pytest.mark.slow
@every_dtype
@pytest.mark.parametrize("codec", ["zero_value", "exponent", BOTH, "masked"])
def test_a_damaged_payload_is_judged_as_on_the_cpu(codec: str, dtype: torch.dtype, device: str) -> None:
    """Payload and words end at unreadable pages, where there are pages."""
    source, num_words, refused, bitmap, there = random.Random(0), NUM_WORDS, 0, None, None
    tries = (sample(codec, dtype, num_words, seed) for seed in range(1000))
    frame, mask, start, count = next(one for one in tries if one.frame.numel() % 64 == 0)
    header, payload = read_header(frame), payload_of(frame)
    if mask is not None:
        bitmap = payload_of(mask).data_ptr()
        there = payload_of(mask)[: sections(num_words).offsets].to(device)
    damaged, words = guarded(len(payload)), guarded(num_words * dtype.itemsize)
    assert damaged.data_ptr() % 64 == 0  # or it would be read from a copy
    twin = integers(torch.empty(num_words, dtype=dtype))
    where = places_to_damage(payload, count, start, 8 * dtype.itemsize)
    for i in range(ROUNDS):
        damaged.copy_(payload)
        for _ in range(source.randint(0 if i % 9 == 0 else 1, 2)):
            damaged[source.choice(source.choice(where))] ^= source.choice([1, 128, source.randint(1, 255)])
        if i % 4 == 3 and count:  # escapes where there were none, perhaps more than a block has bytes for
            run = source.choice(where[4:7])
            damaged[run.start + 8 : run.stop] |= source.choice([1, 16, 255])
        out = integers(words.view(dtype)) if device == "cpu" else twin.to(device)
        wrong = bool(frames.unpack_payload(header, damaged.to(device), out, mask=there))
        assert wrong != judged(header, damaged, bitmap, twin)
        assert wrong or torch.equal(out.cpu(), twin)
        refused += wrong
        if wrong and i % 8 == 0:
            whole = torch.cat([frame[: -len(payload)], damaged]).to(device)
            with pytest.raises(CodecError, match="it was damaged"):
                frames.decode(whole, mask=None if mask is None else mask.to(device))
    assert ROUNDS // 3 < refused < ROUNDS


def test_a_payload_of_another_length_or_dtype_is_refused(device: str) -> None:
    tensor, out = normal(3000, torch.bfloat16), torch.empty(3000, dtype=torch.int16, device=device)
    for codec, values in (("exponent", tensor), (BOTH, tensor.relu())):
        frame = encode(values, codec)
        header, payload = read_header(frame), payload_of(frame)
        start, least = (sections(3000).values, 40) if codec == BOTH else (0, 3600)
        more = torch.cat([payload, payload[:9]])
        for wrong in (payload[:-1], payload[:-64], payload[: start + least], more):
            said = header._replace(payload_bytes=len(wrong))
            assert frames.unpack_payload(said, wrong.to(device), out).item() == 1
        with pytest.raises(CodecError, match=r"floats of 32 or 16 bits, found torch\.int16"):
            frames.unpack_payload(header._replace(dtype=torch.int16), payload.to(device), out)
    frame, mask, _, _ = sample("masked", torch.bfloat16, 3000, 0)
    assert mask is not None
    header, payload, bits = read_header(frame), payload_of(frame), payload_of(mask)[: sections(3000).offsets]
    for length in (0, 1, 63, 64, 200, len(payload)):  # values too few for a plan
        said, wrong = header._replace(payload_bytes=length), payload[:length].to(device)
        found = frames.unpack_payload(said, wrong, out, mask=bits.to(device)).item()
        assert found == (length < len(payload))


def test_nothing_is_written_behind_a_payload(device: str) -> None:
    """The buffer ends at an unreadable page, and what was there behind the payload stays in front of it."""
    tensor = normal(BLOCK + 1501, torch.float32)
    for codec in ("exponent", BOTH):
        for values in (tensor, tensor.relu(), random_bits(len(tensor), torch.float32)):
            room = -(-frame_bytes(values.shape, values.dtype) // 64) * 64
            buffer = guarded(room).fill_(85).to(device)
            frame = frames.pack(values.to(device), buffer, codec, requires_grad=False).finish()
            assert torch.equal(frame.cpu(), encode(values, codec))
            assert bool((buffer[len(frame) :] == 85).all())
