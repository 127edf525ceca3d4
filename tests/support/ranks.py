"""A pool of real ranks, kept for the whole test run, and the ranks of whole runs, each a process of its own.

All are forked from one process that has imported torch and penstock: a rank begins in milliseconds and is
as fresh as a new interpreter, for generators, threads, flags, modules, folder and environment are its own."""

import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from multiprocessing import forkserver, reduction
from pathlib import Path

import pytest

DEADLINE = 120  # seconds until a job must have ended
DIED, SILENT = "the process died", f"no answer within {DEADLINE} s"
READY = ("", "ready")

gc.set_threshold(20_000, 20, 20)  # else a fifth of the time is spent looking through torch

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["preloaded"])


def process(target, *args, **options):
    """A process that is forked from one that has everything imported (``preloaded``)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    return context.Process(target=target, args=args, **options)


class Ranks:
    """``run(function, ..., ranks=n)`` calls ``function(...)`` on n ranks at once and returns their
    results; ``deadline`` is that of their group, in seconds."""

    def __init__(self):
        self.workers = []

    def start(self, number):
        """Start what is missing of so many processes and wait for it, so that no deadline counts that."""
        known = len(self.workers)
        while len(self.workers) < number:
            ours, theirs = context.Pipe()
            one = process(_serve, theirs, daemon=True)
            one.start()
            theirs.close()
            self.workers.append((one, ours))
        for _, pipe in self.workers[known:]:
            assert _answer(pipe) == READY

    def run(self, function, *args, ranks, deadline=30):
        results = self.try_run(function, *args, ranks=ranks, deadline=deadline)
        failed = {rank: text for rank, (text, _) in enumerate(results) if text}
        assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
        return [result for _, result in results]

    def try_run(self, function, *args, ranks, deadline=30):
        """The same; returns (traceback or "", result) of every rank, and starts anew where one died."""
        self.start(ranks)
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(self.workers[:ranks]):
                pipe.send((function, args, str(Path(folder) / "rendezvous"), rank, ranks, deadline))
            results = [_answer(pipe) for _, pipe in self.workers[:ranks]]
        if any(text in (DIED, SILENT) for text, _ in results):
            self.close()
        for (text, _), (_, pipe) in zip(results, self.workers, strict=False):
            if text:
                pipe.send("all have answered")
        return results

    def close(self):
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers.clear()


class ForkedRank:
    """A rank that ``start_ranks`` asks for, as ``subprocess.Popen`` has it, and forked instead of started."""

    def __init__(self, command, environment):
        ours = Descriptor(1), Descriptor(2)
        self.process = process(_live, list(command), dict(environment), *ours)
        self.process.start()
        assert self.process.pid is not None
        self.pid = self.process.pid

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode

    def wait(self, timeout=None):
        self.process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a rank", timeout)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


class Descriptor:
    """An open file of this process, which a process that is forked for it gets, too."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return _detached, (reduction.DupFd(self.number),)


def _detached(file):
    return file.detach()


def _live(command, environment, out, err):
    """Run ``python -P -m MODULE ARGUMENT ...`` in a session of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for file, number in ((out, 1), (err, 2)):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment, PENSTOCK_LAUNCHER=str(os.getppid()))
    sys.path[:] = environment["PYTHONPATH"].split(os.pathsep)
    sys.argv = command[command.index("-m") + 1 :]
    for module in sys.argv[:2]:  # ``rank`` and what it runs, which are programs here
        sys.modules.pop(module, None)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def give_back_memory():
    """Let the system have what this process no longer needs: glibc would keep gigabytes for good."""
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _answer(pipe):
    try:
        return pipe.recv() if pipe.poll(DEADLINE) else (SILENT, None)
    except EOFError:
        return DIED, None


def _serve(pipe):
    """Run a rank: join a group, run a job, leave the group if it succeeded, wait for the next."""
    import torch
    import torch.distributed as dist

    from penstock.pipeline.distributed.process_group import init_group

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    gc.freeze()  # what is here by now is not looked through after every job
    pipe.send(READY)
    while True:
        try:
            function, args, path, rank, ranks, deadline = pipe.recv()
        except EOFError:
            return
        try:
            # A store that counts its users may abort the process when its file is removed.
            store = dist.FileStore(path)  # type: ignore[attr-defined]
            world = init_group(store, rank=rank, ranks=ranks, deadline=deadline)
            result = function(*args)
            if dist.is_initialized():  # the job has not left it
                world.close()
            pipe.send(("", result))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
            pipe.recv()  # a group that is destroyed earlier hides the true error from the other ranks
            if dist.is_initialized():
                dist.destroy_process_group()
        result = None
        give_back_memory()
