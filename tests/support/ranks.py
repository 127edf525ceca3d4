"""A pool of real ranks: processes kept for the whole test run, a new gloo group for every job."""

import ctypes
import gc
import multiprocessing
import tempfile
import traceback
from pathlib import Path

DEADLINE = 120  # seconds until a job must have ended
DIED, SILENT = "the process died", f"no answer within {DEADLINE} s"
READY = ("", "ready")


class Ranks:
    """``run(function, ..., ranks=n)`` calls ``function(...)`` on n ranks at once and returns their
    results; ``deadline`` is that of their group, in seconds."""

    def __init__(self):
        self.context = multiprocessing.get_context("spawn")
        self.workers = []

    def start(self, number):
        """Start what is missing of so many processes and wait for it, so that no deadline counts that."""
        known = len(self.workers)
        while len(self.workers) < number:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))
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
    """What a rank does: join a group, run a job, leave the group if it succeeded, wait for the next."""
    import torch
    import torch.distributed as dist

    from penstock.pipeline.ranks.world import found

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
            world = found(store, rank=rank, ranks=ranks, deadline=deadline)
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
