"""``python -m penstock.scripts.coverage``: try public networks, a process for each, and write the table.

A row is appended as soon as it is known, so a run that was interrupted goes on where it stopped."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from . import page, vision
from .examine import examine
from .network import Network

HOME = {"timm": "timm", "transformers": "transformers"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 1 where a network trained with other bits, else 0."""
    options = _options(arguments)
    rows = {row["name"]: row for row in _read(options.rows)}
    found = _chosen(list(networks()), options.names)
    for network in found:
        if network.full_name in rows and not options.again:
            continue
        row = _row_of(network, options.timeout, options.trace_only)
        rows[network.full_name] = row
        with options.rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(page.line(row), flush=True)
    if options.table:
        command = " ".join([*options.names, f"--table {options.table}"])
        options.table.write_text(page.written(list(rows.values()), command))
    return int(any(row["result"] == "different" for row in rows.values()))


def _chosen(networks: list[Network], names: Sequence[str]) -> list[Network]:
    """Those that a name is a part of, in the order of the names; all, where there are none."""
    found = [n for name in names for n in networks if name in n.full_name]
    return list({n.full_name: n for n in found}.values()) if names else networks


def networks() -> Iterator[Network]:
    """Every network of the libraries that are installed; says which are not."""
    yield from vision.of_torch()
    yield from vision.networks()
    missing = [library for library in ("transformers", "timm") if find_spec(library) is None]
    if missing:
        print(
            f"{' and '.join(missing)} not installed, left out: pip install 'penstock[zoo]'", file=sys.stderr
        )
    if "transformers" not in missing:
        from . import language

        yield from language.networks()
    if "timm" not in missing:
        from . import families

        yield from families.networks()


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m penstock.scripts.coverage", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names of networks; default: all")
    parser.add_argument("--table", type=Path, help="the Markdown file to write")
    parser.add_argument("--rows", type=Path, default=Path("coverage.jsonl"), help="rows so far, and new ones")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each network")
    parser.add_argument("--trace-only", action="store_true", help="record, and do not train")
    parser.add_argument("--again", action="store_true", help="try again what has a row")
    return parser.parse_args(arguments)


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _row_of(network: Network, timeout: float, trace_only: bool) -> dict[str, Any]:
    """What became of a network in a process of its own, which is forked: the libraries are loaded once."""
    if network.skip:
        return {"name": network.full_name, "result": "skipped", "why": network.skip}
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    begun = time.perf_counter()
    process = context.Process(target=_child, args=(network, theirs, trace_only))
    process.start()
    theirs.close()
    row: dict[str, Any] = {"name": network.full_name, "result": "failed", "why": "the process died"}
    try:
        if ours.poll(timeout):
            row = ours.recv()
        else:
            row |= {"result": "timeout", "why": f"took more than {timeout:g} seconds"}
    except EOFError:
        pass
    if row["result"] == "timeout":
        process.kill()
    process.join()
    return row | {"seconds": round(time.perf_counter() - begun, 1)}


def _child(network: Network, pipe: Connection, trace_only: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        row = examine(network, trace_only=trace_only)
    except BaseException as error:
        where = traceback.format_exc().strip().splitlines()[-7:]
        told = f"{type(error).__name__}: {error}"
        row = {"name": network.full_name, "result": "failed", "why": told, "traceback": where}
    pipe.send(row)
    pipe.close()


if __name__ == "__main__":
    sys.exit(main())
