"""Frames made and read on a GPU: the CPU's bytes, the same bits back, and nothing worse than a CodecError.

Without a GPU the kernels run in Triton's interpreter on CPU tensors. That is chosen before Triton is
imported, so one test runs these files again, in a process of its own.
"""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from checkout import run
from gpus import INTERPRETED, assert_law, compile_all, moved, run_interpreted
from tensors import laid_out
from torch import Tensor
from words import bitmap_of, checksum_of

from penstock.compression.codec import CODECS, encode
from penstock.compression.errors import CodecError
from penstock.compression.frame import BLOCK, frame_bytes, header_bytes, read_header, sections
from penstock.compression.gpu import frames, payloads

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:B?Complex.* support is experimental")
WIDTHS = (torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128)
LENGTHS = (0, 1, 31, 32, 33, 4095, 4096, 4097, 8999)
FEW, MANY = (1, 1) if INTERPRETED else (4, 50)  # how much longer and more often on a GPU


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_gpu_frames.py", "test_gpu.py", "test_gpu_exponent.py"])
def test_the_laws_hold_in_the_interpreter(name: str, pytestconfig: pytest.Config) -> None:
    """Frames need every kernel; the other laws are held here with ``--all``, or wherever there is a GPU."""
    options = ["--all"] if pytestconfig.getoption("--all", False) else []
    run_interpreted(str(Path(__file__).with_name(name)), *options)


@pytest.mark.parametrize("dtype", WIDTHS, ids=str)
@pytest.mark.parametrize("lengths", [(33, 4097), pytest.param(LENGTHS, marks=pytest.mark.slow)])
def test_every_width_length_and_density(dtype: torch.dtype, lengths: tuple[int, ...], device: str) -> None:
    for place, size in enumerate(lengths):
        for density in (0, 0.4, 1) if len(lengths) > 2 else (0.4, place):
            assert_law(laid_out(dtype, [size * FEW], [1], first=size % 3, density=density), device)


@pytest.mark.slow
def test_every_pattern_of_16_bits(device: str) -> None:
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert_law(torch.stack([patterns, torch.zeros_like(patterns)], 1), device)


@pytest.mark.slow
def test_a_sample_decides_for_raw_as_on_the_cpu(device: str) -> None:
    whole = 64 * MANY  # blocks: from 64 on the first ones and a sample are looked at
    head, num_samples = min(whole // 32, 32), min(whole // 32, 16)
    sample = [(2 * i + 1) * whole // (2 * num_samples) for i in range(num_samples)]
    codecs = []
    for dense in ([*range(head), *sample[num_samples // 2 :]], sample, [*range(head), *sample]):
        words = torch.zeros(whole * BLOCK + 99, dtype=torch.uint8)
        words[: whole * BLOCK].view(whole, BLOCK)[dense] = 7
        frame = frames.encode(words.to(device)).cpu()
        assert torch.equal(frame, encode(words))
        codecs.append(read_header(frame).codec)
    assert codecs == ["zero_value", "zero_value", "raw"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=str)
def test_every_geometry(dtype: torch.dtype, device: str) -> None:
    for sizes, strides in (
        ([2, 3, 20, 20], [1200, 1, 60, 3]),  # channels last
        ([5, 90], [200, 2]),  # gaps
        ([4, 7, 50], [50, 0, 1]),  # repeated
        ([3, 200], [2, 3]),  # interleaved
        ([3, 4], [1, 1]),  # overlapping: made contiguous
        ([3, 2], [1000, 1]),  # spread out: made contiguous
        ([7, 0, 5], [1, 1, 1]),
        ([], []),
    ):
        assert_law(laid_out(dtype, sizes, strides, first=5), device)


def test_what_is_not_yet_carried_out(device: str) -> None:
    source = laid_out(torch.complex64, [30, 40], [1, 30])
    parts = torch.view_as_real(source)
    parts[parts.isnan()] = 1  # a negated NaN has other bits on a GPU
    for lazy in (torch.conj, lambda x: x.conj().imag, lambda x: x.conj()[:, :1].expand(30, 9)):
        frame = frames.encode(lazy(moved(source, device)), requires_grad=True)
        assert torch.equal(frame.cpu(), encode(lazy(source).requires_grad_()))


def test_every_codec_runs_on_every_device(device: str) -> None:
    for codec in CODECS:
        for dtype in (torch.float32, torch.int64, torch.bool):
            assert_law(laid_out(dtype, [3, 1000], [1000, 1], density=0.2), device, codec)


def narrow_words(dtype: torch.dtype, size: int, width: int, source: random.Random) -> Tensor:
    """Words of ``dtype`` whose range takes ``width`` bits, perhaps across the end of the unsigned numbers."""
    bits = 8 * dtype.itemsize
    least = 0 if dtype is torch.bool else source.getrandbits(bits)
    words = [(least + source.getrandbits(width)) % (1 << bits) for _ in range(size)]
    return torch.from_numpy(np.array(words, dtype=f"uint{bits}")).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("sizes", [(129,), pytest.param((1, 1000, 4097 * FEW), marks=pytest.mark.slow)])
def test_integers_take_the_same_bits(dtype: torch.dtype, sizes: tuple[int, ...], device: str) -> None:
    source, bits = random.Random(0), 8 * dtype.itemsize
    for size in sizes:
        for width in (1,) if dtype is torch.bool else (1, bits // 2 + 1, bits - 1, bits):
            assert_law(narrow_words(dtype, size, width, source), device, "narrow")


def test_a_damaged_head_of_integers_is_refused(device: str) -> None:
    words = (torch.arange(5000) % 9).to(device)
    payload = torch.empty(words.nbytes, dtype=torch.uint8, device=device)
    num_bytes = int(payloads.pack("narrow", words, payload, words.dtype, None)[0])
    for place, value in ((0, 0), (0, 5), (0, 64), (3, 1), (7, 255), (16, 1), (63, 128)):
        damaged = payload[:num_bytes].clone()
        damaged[place] = value
        assert payloads.unpack("narrow", damaged, torch.empty_like(words), words.dtype, None).item()


def test_bits_and_values_that_nothing_stands_for_are_refused(device: str) -> None:
    tensor = torch.where(torch.arange(4203) % 3 == 0, 1.0, 0.0)
    frame = encode(tensor)
    header, payload = read_header(frame), frame[header_bytes(1) :]
    out = torch.empty(4203, dtype=torch.int32, device=device)
    more, beyond, padding = torch.cat([payload, payload[-4:]]), payload.clone(), payload.clone()
    beyond[4203 // 8] |= 128
    padding[4203 // 8 + 1] = 255  # as on the CPU, nobody looks there
    for wrong, expected in ((more, 1), (beyond, 1), (padding, 0)):
        said = header._replace(payload_bytes=len(wrong))
        assert frames.unpack_payload(said, wrong.to(device), out).item() == expected


def test_a_frame_of_another_length_is_refused(device: str) -> None:
    frame = encode(torch.relu(torch.randn(5000))).to(device)
    for wrong in (frame[:-1], frame[:70], frame[:10], frame[:0], torch.cat([frame, frame])):
        with pytest.raises(CodecError):
            frames.decode(wrong)
    with pytest.raises(CodecError, match="1-D uint8"):
        frames.decode(frame.view(1, -1))
    with pytest.raises(CodecError, match="suits its elements"):
        frames.unpack(read_header(frame.cpu())._replace(payload_bytes=99), frame)


def room_of(tensor: Tensor) -> Tensor:
    """A buffer for the frame of ``tensor``, where that lies."""
    return torch.empty(frame_bytes(tensor.shape, tensor.dtype), dtype=torch.uint8, device=tensor.device)


def pending(tensor: Tensor, buffer: Tensor, mask: Tensor | None = None) -> frames.PendingFrame:
    words, header = frames.words_of(tensor)
    return frames.pack_words(words, buffer, header, "zero_value", mask)


def bitmap(is_set: Tensor) -> Tensor:
    """Slow twin: the padded bitmap, in memory order."""
    return torch.from_numpy(bitmap_of(is_set.cpu().reshape(-1).numpy())).to(is_set.device)


def test_the_checksum_of_a_bitmap(device: str) -> None:
    for num_words in (0, 1, 64, 65, 512 * 1025 - 3):
        mask = torch.randint(0, 256, (sections(num_words).offsets,), dtype=torch.uint8)
        found = int(payloads.checksum_of(mask.to(device), num_words)) % (1 << 64)
        assert found == checksum_of(mask.numpy(), num_words)


def test_a_mask_that_does_not_fit_is_refused(device: str) -> None:
    activation, gradient = torch.relu(torch.randn(5000)), torch.randn(5000)
    mask, raw, other = (encode(x).to(device) for x in (activation, torch.ones(5000), activation.flip(0)))
    short, there = encode(activation[:4000]).to(device), gradient.to(device)
    frame = frames.encode(there, mask=mask)
    for wrong in (None, other, raw, short, frame, mask[:-1]):
        with pytest.raises(CodecError):
            frames.decode(frame, mask=wrong)
    for useless in (raw, short, frame):  # has no bitmap for this tensor
        assert torch.equal(frames.encode(there, mask=useless).cpu(), encode(gradient))
    header, out = read_header(frame.cpu()), torch.empty(5000, dtype=torch.int32, device=device)
    more = torch.cat([frame[64:], frame[64:68]])
    said = header._replace(payload_bytes=len(more))
    assert frames.unpack_payload(said, more, out, mask=mask[64 : 64 + 640]).item()


def test_bits_beyond_the_words_select_nothing(device: str) -> None:
    gradient, mask = torch.randn(5000).to(device), bitmap(torch.randn(5000).to(device) > 0)
    packed = []
    for _ in range(2):
        packed.append(pending(gradient, room_of(gradient), mask).finish())
        mask[626] = 255
    assert torch.equal(*packed)
    full = bitmap(torch.ones(5000, device=device) > 0)
    frame = pending(gradient, room_of(gradient), full).finish()
    assert torch.equal(frame.cpu(), encode(gradient.cpu(), "raw"))


def test_packing_says_what_it_cannot_take(device: str) -> None:
    tensor = torch.relu(torch.randn(70, 80)).to(device)
    buffer = room_of(tensor)
    frame = pending(tensor, buffer).finish()
    assert frame.data_ptr() == buffer.data_ptr()
    assert torch.equal(frame.cpu(), encode(tensor.cpu()))
    with pytest.raises(CodecError, match="dense"):
        frames.encode(tensor.to_sparse())
    with pytest.raises(CodecError, match="nothing"):
        frames.encode(tensor, "nothing")


KERNELS = {
    "zero_value": "count_words count_bits decide decide_masked compact expand checksum",
    "narrow": "range_of_words decide_narrow pack_rows unpack_rows",
}


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("module", KERNELS)
def test_kernels_compile_where_there_is_no_gpu(module, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    loops = payloads.kernels(module)
    types = dict.fromkeys(("words", "values", "payload", "out", "bitmap", "error"), "*i32")
    types |= dict.fromkeys(("counts", "offsets", "facts", "partial", "lows", "highs", "head"), "*i64")
    constants = {"BLOCK": BLOCK, "TILE": 1024, "ROWS": 64, "BITS": 32, "LANES": 16, "FLIP": 0, "MOST": 32}
    constants |= {"WORD_BYTES": 4, "NUMBER": 1, "WIDE": getattr(loops, "WIDE", {32: None})[32], "EXACT": True}
    for name in KERNELS[module].split():
        own = types | ({"bitmap": "*i64"} if name == "checksum" else {})
        words = getattr(loops, "SIGNED" if name == "range_of_words" else "UNSIGNED", {32: None})[32]
        compile_all(module, [name], own, constants | {"WORD": words})


def test_without_triton_there_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "penstock.compression.gpu.zero_value", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(CodecError, match="install the triton that this torch asks for"):
        frames.encode(torch.zeros(9000))


@pytest.mark.skipif(INTERPRETED, reason="one process more says the same")
def test_nothing_imports_triton_but_kernels() -> None:
    code = "import sys, penstock.compression.gpu.frames; assert 'triton' not in sys.modules"
    run("-c", code)
