"""``python -m penstock.scripts.bench.gpu``: kernels against a device-to-device copy, and their laws.

It needs a GPU, which most machines that test this code do not have, so one call learns all there is to learn:
that the bytes are the CPU's, that the host never waits, and how fast it is.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ...compression import gpu, gpu_zero_value
from ...compression.codec import decode, encode
from ...compression.frame import frame_bytes, header_bytes, read_header
from .gpu_cases import case, room_of, tensors, words_of

MEBIBYTE = 1 << 20
WIDTH = 150
ROUTES = ("pack", "unpack", "pack_masked", "unpack_masked")
_ROTATED = (
    512 * MEBIBYTE
)  # a route goes through so many bytes of tensors in a row, far more than a cache holds


def main(arguments: Sequence[str]) -> int:
    """Check and time every combination; print a table and write ``results.json``. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m penstock.scripts.bench.gpu")
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--densities", type=float, nargs="+", default=[0, 0.1, 0.3, 0.5, 0.7, 0.9, 1])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int64", "bool"])
    parser.add_argument(
        "--warps", type=int, nargs="+", default=[None], help="compare programs of so many warps"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--results", type=Path, default=Path("results.json"))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("this bench needs a GPU, torch finds none; run it where there is one", file=sys.stderr)
        return 2
    rows, sizes = [], [num_mebibytes * MEBIBYTE for num_mebibytes in options.mebibytes]
    for tensor, codec, facts in tensors(options.dtypes, sizes, options.densities, "cuda"):
        check(tensor, codec)
        for num_warps in options.warps if codec == "zero_value" else [None]:
            rows.append(facts | measured(tensor, codec, num_warps, options.repeats))
            print(
                f"{rows[-1]['dtype']} {codec} {tensor.nbytes // MEBIBYTE} MiB {facts['density']}", flush=True
            )
    report(rows, arguments, options.results)
    return 0


def check(tensor: Tensor, codec: str) -> None:
    """Hold the kernels to their laws; AssertionError if one is broken."""
    home = tensor.cpu()
    expected, words = encode(home, codec), words_of(tensor)
    assert torch.equal(gpu.encode(tensor, codec).cpu(), expected), "a GPU makes the CPU's bytes"
    back, twin = gpu.decode(expected.to(tensor.device)), decode(expected)
    assert back is not None, "this frame has a tensor"
    assert twin is not None, "this frame has a tensor"
    assert torch.equal(words_of(back), words), "the same bits come back"
    assert torch.equal(words_of(twin), words.cpu()), "the same bits come back on the CPU"
    buffer = room_of(frame_bytes(tensor.shape, tensor.dtype), tensor.device)
    header, start, out = read_header(expected), header_bytes(tensor.dim()), torch.empty_like(words)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # from here on torch raises where the host waits
    try:
        packed = gpu.pack_on_device(tensor, buffer, codec=codec)
        error = gpu.unpack_on_device(header, buffer[start : start + header.payload_bytes], out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not int(error), "a sound payload is found to be sound"
    assert torch.equal(out, words), "the same bits come back without a wait"
    assert torch.equal(gpu.finish(packed, gpu.header_of(tensor)).cpu(), expected), (
        "the same frame without a wait"
    )


def measured(tensor: Tensor, codec: str, num_warps: int | None, repeats: int) -> dict[str, Any]:
    """What a row says of ``tensor``: seconds of each route, medians of alternating runs, and its bytes."""
    cases = [case(tensor, codec, num_warps) for _ in range(max(2, _ROTATED // tensor.nbytes))]
    routes = ("copy", *ROUTES) if codec == "zero_value" else ("copy", *ROUTES[:2])
    graphs = {route: _graph([getattr(one, route) for one in cases]) for route in routes}
    taken: dict[str, list[float]] = {route: [] for route in routes}
    for _ in range(repeats):
        for route, graph in graphs.items():
            taken[route].append(_seconds(graph) / len(cases))
    buffer = room_of(frame_bytes(tensor.shape, tensor.dtype), tensor.device)
    start = time.perf_counter()
    for _ in range(20):
        gpu.pack_on_device(tensor, buffer, codec=codec)
    host_seconds = (time.perf_counter() - start) / 20
    torch.cuda.synchronize()
    return {
        "num_bytes": tensor.nbytes,
        "num_warps": num_warps or gpu_zero_value.NUM_WARPS[min(tensor.element_size(), 8)],
        "ratio": tensor.nbytes / cases[0].payload.nbytes,
        "seconds": {route: statistics.median(seconds) for route, seconds in taken.items()},
        "least_bytes": {route: cases[0].least_bytes(route) for route in routes},
        "moved_bytes": {route: cases[0].moved_bytes(route) for route in routes},
        "pack_call_host_seconds": host_seconds,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """``rows`` for people: a route's speed, and its bytes a second, both as multiples of the copy's."""
    caption = (
        "speed | bytes/s that it had to move | bytes/s that it moved, as multiples of a device-to-device copy"
    )
    shown = Table(caption=caption)
    headings = ("dtype", "codec", "MiB", "density", "warps", "ratio", "copy TB/s", *ROUTES, "host us")
    for heading in headings:
        shown.add_column(heading, justify="left" if heading in ("dtype", "codec") else "right")
    for row in rows:
        seconds = row["seconds"]
        copied = row["least_bytes"]["copy"] / seconds["copy"]
        cells = [row["dtype"], row["codec"], f"{row['num_bytes'] / MEBIBYTE:.0f}", f"{row['density']:.1f}"]
        cells += [str(row["num_warps"]), f"{row['ratio']:.2f}", f"{copied / 1e12:.2f}"]
        for route in ROUTES:
            shares = [seconds["copy"] / seconds[route]] if route in seconds else []
            if shares:
                shares += [
                    row[bytes_][route] / seconds[route] / copied for bytes_ in ("least_bytes", "moved_bytes")
                ]
            cells.append(" ".join(f"{share:.2f}" for share in shares))
        shown.add_row(*cells, f"{row['pack_call_host_seconds'] * 1e6:.0f}")
    return shown


def report(rows: Sequence[Mapping[str, Any]], arguments: Sequence[str], path: Path) -> None:
    """Write ``rows`` with what a number needs beside it, and print their table."""
    import triton

    from ...pipeline.run import console
    from ...stages.files import save_json
    from .command import circumstances

    about = circumstances("gpu", [])
    about["command"] = shlex.join(["python", "-m", "penstock.scripts.bench.gpu", *arguments])
    device = torch.cuda.get_device_properties(0)
    about["hardware"] |= {"gpu": device.name, "gpu_bytes": device.total_memory}
    about["hardware"] |= {"multiprocessors": device.multi_processor_count}
    about["versions"] |= {"triton": triton.__version__, "cuda": str(torch.version.cuda)}
    save_json(path, about | {"rows": list(rows)})
    console.screen(width_of_a_log=WIDTH).print(table(rows))
    print(f"laws held on every row: the CPU's bytes, the same bits back, no wait of the host\n{path}")


def _graph(steps: Sequence[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    """All ``steps`` as one replay, so that no time is the host's."""
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
    return graph


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
