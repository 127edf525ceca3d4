"""The part ``jobs`` of ``penstock bench cache``: two ``penstock train`` side by side on one data set behind
a slow store, by turns with and without ``cache=shared``.

Losses and weights are the same either way, or it says so."""

from __future__ import annotations

import contextlib
import hashlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...compression.errors import TransportError
from ...conf.bench_cache import BenchCacheConfig
from ...pipeline.run.metrics import read_lines
from ...pipeline.run.run_folder import RunFolder
from ...pipeline.samples.cache.pages import PAGE_BYTES, pages_of
from ...stages.units import parse_bytes
from . import slow_store
from .cache_real import bucket_of
from .harness import Record, alternate, spread

WITHOUT, WITH = "without", "with"
JOBS = 2
_SECONDS = 600.0  # that a turn may take
_TRAIN = (
    "data._target_=penstock.scripts.bench.slow_store.samples",
    "data.workers=1",
    "model=mlp",
    "model.hidden=[64]",
    "ranks=1",
    "micro_batches=1",
    "threads=1",
    "codec=raw",
)

Run = dict[str, Any]


def bench(config: BenchCacheConfig, record: Record) -> None:
    """Let the sides take turns, and keep and say what each took."""
    record.keep(jobs=[])
    for share in config.shares:
        sides: dict[str, Callable[[], Run]] = {
            WITHOUT: partial(turn, config, share, shared=False),
            WITH: partial(turn, config, share, shared=True),
        }
        taken = alternate(sides, config.repeats)
        record.keep(jobs=[row(share, taken)])
        record.say(sentence(record.content["jobs"][-1]))


def turn(config: BenchCacheConfig, share: float, *, shared: bool) -> Run:
    """Two jobs with seeds of their own, begun together, with a store and a broker of this turn.

    Raises: TransportError: one failed."""
    num_bytes = parse_bytes(config.sample_bytes, name="sample_bytes")
    files = slow_store.MadeUp(num_samples=config.num_samples, num_bytes=num_bytes)
    with contextlib.ExitStack() as opened:
        home = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        store = opened.enter_context(slow_store.serving(home / "store.sock", files, bucket_of(config)))
        options = [*_TRAIN, f"data.address={store}", f"batch_size={config.batch_size}"]
        options.append(f"epochs={config.epochs}")
        if shared:
            slots = round(share * config.num_samples)
            capacity = slots * pages_of(num_bytes, PAGE_BYTES) * PAGE_BYTES
            opened.enter_context(_broker(home / "cache.sock", capacity))
            options += ["cache=shared", f"cache.socket={home / 'cache.sock'}", "cache.data=slow store"]
        began = time.monotonic()
        folders = [RunFolder(path=home / f"job{number}") for number in range(JOBS)]
        running = [
            opened.enter_context(
                _command("train", *options, f"seed={number}", f"hydra.run.dir={folder.path}")
            )
            for number, folder in enumerate(folders)
        ]
        seconds = []
        for job in running:
            said, _ = job.communicate(timeout=_SECONDS)
            if job.returncode:
                raise TransportError(f"a job of the bench failed: {said.strip()[-800:]}")
            seconds.append(time.monotonic() - began)
        return {"makespan": max(seconds)} | _read(folders)


def _read(folders: Sequence[RunFolder]) -> Run:
    """What runs left behind."""
    told = [folder.read_summary()["data"][0] for folder in folders]  # of the only rank
    losses = [[line["loss"] for line in read_lines(folder.metrics)] for folder in folders]
    return {
        "waited": [one["waited_seconds"] for one in told],
        "cache": [one.get("cache") for one in told],
        "losses": losses,
        "weights": [
            hashlib.sha256((folder.path / "model.safetensors").read_bytes()).hexdigest() for folder in folders
        ],
    }


@contextlib.contextmanager
def _broker(socket: Path, capacity: int) -> Iterator[None]:
    """``penstock cache serve``, as one types it; ends by Ctrl-C."""
    with _command("cache", "serve", f"capacity={capacity}", f"socket={socket}") as process:
        assert process.stdout is not None
        said = process.stdout.readline()  # it tells where it listens, or why it does not
        if not socket.exists():
            raise TransportError(f"penstock cache serve does not begin: {said.strip()}")
        yield


@contextlib.contextmanager
def _command(*typed: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "penstock.scripts.command", *typed]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def row(share: float, taken: dict[str, list[Run]]) -> dict[str, Any]:
    """What all turns say together."""
    runs = [*taken[WITHOUT], *taken[WITH]]
    pairs = [a["makespan"] / b["makespan"] for a, b in zip(taken[WITHOUT], taken[WITH], strict=True)]
    counts = [one for run in taken[WITH] for one in run["cache"]]
    hits, loads = (sum(one[name] for one in counts) for name in ("hits", "loads"))
    return {
        "jobs": JOBS,
        "share": share,
        "speedup": statistics.median(pairs),
        "speedup_of_pairs": pairs,
        "hit_rate": hits / max(1, hits + loads),
        "same_losses": all(run["losses"] == runs[0]["losses"] for run in runs),
        "same_weights": all(run["weights"] == runs[0]["weights"] for run in runs),
        "steps": [len(losses) for losses in runs[0]["losses"]],
        "last_losses": [losses[-1] for losses in runs[0]["losses"]],
        "weights": runs[0]["weights"],
    } | {
        side: {name: [run[name] for run in taken[side]] for name in ("makespan", "waited")} for side in taken
    }


def sentence(found: dict[str, Any]) -> str:
    """The row as a person reads it."""
    without, beside = (statistics.median(found[side]["makespan"]) for side in (WITHOUT, WITH))
    same = found["same_losses"] and found["same_weights"]
    return (
        f"two penstock train on one data set, a cache of {found['share']:.0%}: {without:.1f} s without, "
        f"{beside:.1f} s with cache=shared, {found['speedup']:.2f}x "
        f"({spread(found['speedup_of_pairs'])}) as fast; {found['hit_rate']:.3f} of all samples came from "
        f"the cache; losses and weights {'are the same' if same else 'DIFFER'}"
    )
