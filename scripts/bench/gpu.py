"""Speed of the codecs' kernels on a GPU, next to a device-to-device copy, after a check of their laws.

Most machines that test this code have no GPU, so one call checks all there is to check: that the bytes are
the CPU's, that the host never waits, and the speeds. Every tensor has its own memory, which is written
before the clock starts, so that no route finds another's data in the cache."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
from harness import Options, Results, Row, alternate, medians, timed
from torch import Tensor

from penstock.compression.codec import decode, encode
from penstock.compression.errors import ConfigError
from penstock.compression.frame import frame_bytes, header_bytes, read_header, sections
from penstock.compression.gpu import frames, payloads, zero_value
from penstock.compression.names import CODEC_NAMES

MEBIBYTE = 1 << 20
ROUTES = ("pack", "unpack", "pack_masked", "unpack_masked")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ROTATED = 512 * MEBIBYTE
"""A route goes through so many bytes of tensors in a row, far more than a cache holds."""
COLUMNS: dict[str, Any] = {
    "dtype": "{dtype}",
    "codec": "{codec}",
    "MiB": lambda row: f"{row['num_bytes'] / MEBIBYTE:.0f}",
    "density": "{density:.1f}",
    "ratio": "{ratio:.2f}",
    "copy TB/s": lambda row: f"{row['least_bytes']['copy'] / row['seconds']['copy'] / 1e12:.2f}",
    **{route: lambda row, route=route: _route(row, route) for route in ROUTES},
    "host us": lambda row: f"{row['pack_call_host_seconds'] * 1e6:.0f}",
}


def options() -> Any:
    """Return the parser of the command line."""
    made = harness.parser(__doc__, repeats=15)
    listed, add = harness.list_of, made.add_argument
    add("--mebibytes", type=listed(harness.at_least(1)), default=[64, 256], help="sizes of the tensors")
    add("--densities", type=listed(harness.at_least(0.0)), default=[0, 0.1, 0.3, 0.5, 0.7, 0.9, 1],
        help="share of non-zero elements")  # fmt: skip
    return made


def bench(asked: Options, path: Path) -> Results:
    """Check and time every combination; return the results."""
    if not torch.cuda.is_available():
        raise ConfigError("this bench needs a GPU, torch finds none; run it where there is one")
    import triton

    results, device = Results(path, rows=[]), torch.cuda.get_device_properties(0)
    gpu_facts = {"gpu": device.name, "gpu_bytes": device.total_memory}
    results.content["hardware"] |= gpu_facts | {"multiprocessors": device.multi_processor_count}
    results.content["versions"] |= {"triton": triton.__version__, "cuda": str(torch.version.cuda)}
    sizes = [number * MEBIBYTE for number in asked.mebibytes]
    for tensor, codec, facts in tensors(sizes, asked.densities, "cuda"):
        check(tensor, codec)
        results.keep(rows=[facts | measured(tensor, codec, asked.repeats)])
        print(facts["dtype"], codec, tensor.nbytes // MEBIBYTE, "MiB", facts["density"], flush=True)
    harness.show(results.content["rows"], COLUMNS, left=2)
    print("of a route: speed, and bytes/s that it had to move, as multiples of a copy")
    print("laws held on every row: the CPU's bytes, the same bits back, no wait of the host")
    return results


def check(tensor: Tensor, codec: str) -> None:
    """Hold the kernels to their laws; AssertionError if one is broken."""
    home = tensor.cpu()
    expected, words = encode(home, codec), words_of(tensor)
    assert torch.equal(frames.encode(tensor, codec).cpu(), expected), "a GPU makes the CPU's bytes"
    for back in (frames.decode(expected.to(tensor.device)), decode(expected)):
        assert back is not None, "this frame has a tensor"
        assert torch.equal(words_of(back).to(words.device), words), "the same bits come back, also on the CPU"
    buffer = room_of(frame_bytes(tensor.shape, tensor.dtype), tensor.device)
    header, start, out = read_header(expected), header_bytes(tensor.dim()), torch.empty_like(words)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # from here on torch raises where the host waits
    try:
        packed = frames.pack(tensor, buffer, codec, requires_grad=False)
        error = frames.unpack_payload(header, buffer[start : start + header.payload_bytes], out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not int(error), "a sound payload is found to be sound"
    assert torch.equal(out, words), "the same bits come back without a wait"
    finished = packed.finish().cpu()
    assert torch.equal(finished, expected), "the same frame without a wait"


def measured(tensor: Tensor, codec: str, repeats: int) -> dict[str, Any]:
    """Row of ``tensor``: seconds of each route, medians of alternating runs, and its bytes."""
    cases = [case(tensor, codec) for _ in range(max(2, ROTATED // tensor.nbytes))]
    routes, least, payload_bytes = cases[0]
    graphs = {route: _graph([one[route] for one, *_ in cases]) for route in routes}
    seconds = medians(alternate(graphs, repeats))
    buffer = room_of(frame_bytes(tensor.shape, tensor.dtype), tensor.device)
    host_seconds = timed(lambda: frames.pack(tensor, buffer, codec, requires_grad=False), 20)()
    torch.cuda.synchronize()
    row = {"num_bytes": tensor.nbytes, "ratio": tensor.nbytes / payload_bytes, "least_bytes": least}
    row |= {"seconds": {route: taken / len(cases) for route, taken in seconds.items()}}
    return row | {"pack_call_host_seconds": host_seconds}


def _route(row: Row, route: str) -> str:
    times = row["seconds"]["copy"] / row["seconds"][route]
    return f"{times:.2f} {times * row['least_bytes'][route] / row['least_bytes']['copy']:.2f}"


def _graph(steps: Sequence[Callable[[], object]]) -> Callable[[], float]:
    """All ``steps`` as one replay, so that no time is the host's; it returns its seconds."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for step in steps:
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step in steps:
            step()

    def replay() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    return replay


def tensors(
    sizes: Sequence[int], densities: Sequence[float], device: str
) -> Iterator[tuple[Tensor, str, dict[str, Any]]]:
    """Yield random tensors of ``sizes`` bytes, their codec, and what a row says of them.

    Integers and booleans are for narrow, and of one density; floats for zero_value, and for exponent, after
    zero_value where there are zeros."""
    source = torch.Generator(device).manual_seed(0)
    for name in ("float32", "bfloat16", "int64", "bool"):
        dtype = getattr(torch, name)
        for size in [num_bytes // dtype.itemsize for num_bytes in sizes]:
            for density in densities if dtype.is_floating_point else [0.5]:
                kept = torch.rand(size, generator=source, device=device) < density
                tensor = torch.where(kept, torch.randn(size, generator=source, device=device), 0.0)
                tensor = (tensor if dtype.is_floating_point else tensor.abs() * 3).to(dtype)
                exponent = "exponent" if density == 1 else "zero_value+exponent"
                for codec in ("zero_value", exponent) if dtype.is_floating_point else ("narrow",):
                    yield tensor, codec, {"dtype": name, "codec": codec, "density": density}


def case(tensor: Tensor, codec: str) -> tuple[dict[str, Callable[[], object]], dict[str, int], int]:
    """Routes of a copy of ``tensor`` by name (``copy``: from device to device), the bytes that each has to
    read and write, whatever it does, and those of the payload."""
    words, device, dtype = words_of(tensor).clone(), tensor.device, tensor.dtype
    payload, values, room = (room_of(tensor.nbytes, device) for _ in range(3))
    num_bytes, number, _ = payloads.pack(codec, words, payload, dtype, None).tolist()
    payload, out, packer = payload[:num_bytes], torch.empty_like(words), CODEC_NAMES[number]
    routes: dict[str, Callable[[], object]] = {
        "copy": lambda: out.copy_(words),
        "pack": lambda: payloads.pack(codec, words, room, dtype, None),
        "unpack": lambda: payloads.unpack(packer, payload, out, dtype, None),
    }
    least = {"copy": 2 * words.nbytes} | dict.fromkeys(("pack", "unpack"), words.nbytes + payload.nbytes)
    if codec == "zero_value":
        bits = (words != 0).view(-1, 8) * torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], device=device)
        mask = bits.sum(1).to(torch.uint8)
        mask = torch.nn.functional.pad(mask, (0, sections(len(words)).offsets - len(mask)))
        values = values[: int(zero_value.pack_masked(words, values, mask)[0])]
        routes["pack_masked"] = lambda: zero_value.pack_masked(words, room, mask)
        routes["unpack_masked"] = lambda: zero_value.unpack(values, out, mask=mask)
        masked = words.nbytes + values.nbytes + mask.nbytes
        least |= dict.fromkeys(("pack_masked", "unpack_masked"), masked)
    return routes, least, payload.nbytes


def words_of(tensor: Tensor) -> Tensor:
    """The words of a contiguous tensor."""
    return tensor.view(-1).view(INTEGERS[tensor.element_size()])


def room_of(num_bytes: int, device: torch.device) -> Tensor:
    """Bytes not yet written."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


if __name__ == "__main__":
    harness.main(options(), bench)
