"""``python scripts/coverage``: do public networks train in three stages with the bits of the plain loop?

A row is appended as soon as it is known, so a run that was interrupted goes on where it stopped."""

import argparse
import functools
import json
import multiprocessing
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import language
import page
import torch
import vision
from examine import examine, examine_lengths
from language import Network

OTHERS = {  # libraries that need not be installed
    "transformers": language.networks,
    "peft": language.adapters,
    "timm": vision.of_timm,
}


def main() -> int:
    """Run the command; the exit code is 1 where a network trained with other bits, else 0."""
    parser = argparse.ArgumentParser(prog="python scripts/coverage", description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names of networks; default: all")
    parser.add_argument("--table", type=Path, help="the Markdown file to write")
    parser.add_argument("--rows", type=Path, default=Path("coverage.jsonl"), help="rows so far, and new ones")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each network")
    wants = {"action": argparse.BooleanOptionalAction, "default": True}
    parser.add_argument("--autocast", **wants, help="try each under autocast, too")
    options = parser.parse_args()
    lines = options.rows.read_text().splitlines() if options.rows.exists() else []
    rows = {row["name"]: row for row in map(json.loads, lines)}
    known = {one.full_name: one for one in networks()}
    for name, network in (
        (name, known[name]) for part in options.names or [""] for name in known if part in name
    ):
        if name in rows:
            continue
        rows[name] = _row_of(network, options.timeout, autocast=options.autocast)
        with options.rows.open("a") as file:
            file.write(json.dumps(rows[name]) + "\n")
        print(page.line(rows[name]), flush=True)
    if options.table:
        options.table.write_text(page.written(list(rows.values()), " ".join(sys.argv[1:])))
    results = [row.get(field) for row in rows.values() for field in page.RESULT_FIELDS]
    return int("different" in results)


def networks() -> Iterator[Network]:
    """Every network of the libraries that are installed; says which are not."""
    yield from vision.of_torch()
    yield from vision.networks()
    for library, others in OTHERS.items():
        if find_spec(library):
            yield from others()
        else:
            print(f"{library} is not installed, left out: pip install 'penstock[zoo]'", file=sys.stderr)


def _row_of(network: Network, timeout: float, *, autocast: bool) -> dict[str, Any]:
    """Row of a network, tried as it is; if that is trained, at a second length; if there was time, under
    autocast."""
    row: dict[str, Any] = {"name": network.full_name}
    if network.skip:
        return row | {"result": "skipped", "why": network.skip}
    row |= _attempt(functools.partial(examine, network), timeout)
    if row["result"] == "same":
        further = _attempt(functools.partial(examine_lengths, network), timeout)
        row |= {f"lengths_{field}": value for field, value in further.items()}
    if autocast and row["result"] != "timeout":
        cast = _attempt(functools.partial(examine, network, autocast=torch.bfloat16), timeout)
        row |= {f"autocast_{field}": value for field, value in cast.items()}
    return row


def _attempt(call: Callable[[], dict[str, Any]], timeout: float) -> dict[str, Any]:
    """Try a network in a process of its own, which is forked: the libraries are loaded once."""
    row: dict[str, Any] = {}
    context, begun = multiprocessing.get_context("fork"), time.perf_counter()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(call, theirs))
    process.start()
    theirs.close()
    try:
        if ours.poll(timeout):
            row |= ours.recv()
        else:
            row |= {"result": "timeout", "why": f"took more than {timeout:g} seconds"}
            process.kill()
    except EOFError:
        row |= {"result": "failed", "why": "the process died"}
    process.join()
    return row | {"seconds": round(time.perf_counter() - begun, 1)}


def _child(call: Callable[[], dict[str, Any]], pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        row = call()
    except BaseException as error:
        lines = traceback.format_exc().strip().splitlines()[-7:]
        row = {"result": "failed", "why": f"{type(error).__name__}: {error}", "traceback": lines}
    pipe.send(row)


if __name__ == "__main__":
    sys.exit(main())
