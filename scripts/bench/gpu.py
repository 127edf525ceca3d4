"""``python -m penstock.scripts.bench.gpu``: kernels against a device-to-device copy, and their laws.

It needs a GPU, which most machines that test this code do not have, so one call learns all there is to learn:
that the bytes are the CPU's, that the host never waits, and how fast it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ...compression import gpu, gpu_zero_value
from ...compression.codec import decode, encode
from ...compression.frame import frame_bytes, header_bytes, read_header
from ...pipeline.run import console
from ...stages.files import save_json
from .gpu_cases import case, room_of, tensors, words_of
from .harness import WIDTH, Row, alternate, circumstances, medians, table, timed

MEBIBYTE = 1 << 20
MODULE = "penstock.scripts.bench.gpu"
ROUTES = ("pack", "unpack", "pack_masked", "unpack_masked")
_ROTATED = 512 * MEBIBYTE
"""A route goes through so many bytes of tensors in a row, far more than a cache holds."""


def main(arguments: Sequence[str]) -> int:
    """Check and time every combination; print a table and write ``results.json``. Returns the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--densities", type=float, nargs="+", default=[0, 0.1, 0.3, 0.5, 0.7, 0.9, 1])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int64", "bool"])
    warps = "compare programs of so many warps"
    parser.add_argument("--warps", type=int, nargs="+", default=[None], help=warps)
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
            told = f"{facts['dtype']} {codec} {tensor.nbytes // MEBIBYTE} MiB {facts['density']}"
            print(told, flush=True)
    report(rows, arguments, options.results)
    return 0


def check(tensor: Tensor, codec: str) -> None:
    """Hold the kernels to their laws; AssertionError if one is broken."""
    home = tensor.cpu()
    expected, words = encode(home, codec), words_of(tensor)
    assert torch.equal(gpu.encode(tensor, codec).cpu(), expected), "a GPU makes the CPU's bytes"
    for back in (gpu.decode(expected.to(tensor.device)), decode(expected)):
        assert back is not None, "this frame has a tensor"
        assert torch.equal(words_of(back).to(words.device), words), "the same bits come back, also on the CPU"
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
    finished = gpu.finish(packed, gpu.header_of(tensor)).cpu()
    assert torch.equal(finished, expected), "the same frame without a wait"


def measured(tensor: Tensor, codec: str, num_warps: int | None, repeats: int) -> dict[str, Any]:
    """What a row says of ``tensor``: seconds of each route, medians of alternating runs, and its bytes."""
    cases = [case(tensor, codec, num_warps) for _ in range(max(2, _ROTATED // tensor.nbytes))]
    graphs = {route: _graph([one.routes[route] for one in cases]) for route in cases[0].routes}
    seconds = medians(alternate(graphs, repeats))
    buffer = room_of(frame_bytes(tensor.shape, tensor.dtype), tensor.device)
    host_seconds = timed(lambda: gpu.pack_on_device(tensor, buffer, codec=codec), 20)()
    torch.cuda.synchronize()
    return {
        "num_bytes": tensor.nbytes,
        "num_warps": num_warps or gpu_zero_value.NUM_WARPS[min(tensor.element_size(), 8)],
        "ratio": tensor.nbytes / cases[0].payload.nbytes,
        "seconds": {route: taken / len(cases) for route, taken in seconds.items()},
        "least_bytes": cases[0].least_bytes,
        "moved_bytes": cases[0].moved_bytes,
        "pack_call_host_seconds": host_seconds,
    }


def shown(rows: Sequence[Row]) -> Table:
    """``rows`` for people: a route's speed, and its bytes a second, both as multiples of the copy's."""
    caption = (
        "speed | bytes/s that it had to move | bytes/s that it moved, as multiples of a device-to-device copy"
    )
    return table([_words(row) for row in rows], left=("dtype", "codec"), caption=caption)


def _words(row: Row) -> dict[str, str]:
    seconds, least = row["seconds"], row["least_bytes"]
    words = {
        "dtype": row["dtype"],
        "codec": row["codec"],
        "MiB": f"{row['num_bytes'] / MEBIBYTE:.0f}",
        "density": f"{row['density']:.1f}",
        "warps": str(row["num_warps"]),
        "ratio": f"{row['ratio']:.2f}",
        "copy TB/s": f"{least['copy'] / seconds['copy'] / 1e12:.2f}",
    }
    for route in ROUTES:
        moves = [row[which].get(route, 0) / least["copy"] for which in ("least_bytes", "moved_bytes")]
        times = seconds["copy"] / seconds.get(route, inf)
        words[route] = " ".join(f"{times * share:.2f}" for share in (1, *moves)) if times else ""
    return words | {"host us": f"{row['pack_call_host_seconds'] * 1e6:.0f}"}


def report(rows: Sequence[Row], arguments: Sequence[str], path: Path) -> None:
    """Write ``rows`` with what a number needs beside it, and print their table."""
    import triton

    about, device = circumstances(["python", "-m", MODULE, *arguments]), torch.cuda.get_device_properties(0)
    about["hardware"] |= {"gpu": device.name, "gpu_bytes": device.total_memory}
    about["hardware"]["multiprocessors"] = device.multi_processor_count
    about["versions"] |= {"triton": triton.__version__, "cuda": str(torch.version.cuda)}
    save_json(path, about | {"rows": list(rows)})
    console.screen(width_of_a_log=WIDTH).print(shown(rows))
    print(f"laws held on every row: the CPU's bytes, the same bits back, no wait of the host\n{path}")


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
