"""A pool of real ranks: processes kept for the whole test run, a new gloo group for every job."""

import multiprocessing
import tempfile
import traceback
from pathlib import Path

DEADLINE = 120  # seconds until a job must have ended


class Ranks:
    """``run(function, ..., ranks=n)`` calls ``function(...)`` on n ranks at once and returns their
    results."""

    def __init__(self):
        self.context = multiprocessing.get_context("spawn")
        self.workers = []

    def start(self, number):
        while len(self.workers) < number:
            ours, theirs = self.context.Pipe()
            process = self.context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def run(self, function, *args, ranks):
        results = self.try_run(function, *args, ranks=ranks)
        failed = {rank: text for rank, (text, _) in enumerate(results) if text}
        assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())
        return [result for _, result in results]

    def try_run(self, function, *args, ranks):
        """The same; returns (traceback or "", result) of every rank and starts anew after a failure."""
        self.start(ranks)
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(self.workers[:ranks]):
                pipe.send((function, args, str(Path(folder) / "rendezvous"), rank, ranks))
            results = [_answer(pipe) for _, pipe in self.workers[:ranks]]
        if any(text for text, _ in results):
            self.close()
        return results

    def close(self):
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers.clear()


def _answer(pipe):
    try:
        return pipe.recv() if pipe.poll(DEADLINE) else (f"no answer within {DEADLINE} s", None)
    except EOFError:
        return "the process died", None


def _serve(pipe):
    """What a rank does: join a group, run a job, leave the group if it succeeded, wait for the next."""
    import torch
    import torch.distributed as dist

    from penstock.pipeline.ranks.world import found

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    while True:
        try:
            function, args, path, rank, ranks = pipe.recv()
        except EOFError:
            return
        try:
            # A store that counts its users may abort the process when its file is removed.
            world = found(dist.FileStore(path), rank=rank, ranks=ranks, deadline=30)  # type: ignore[attr-defined]
            result = function(*args)
            if dist.is_initialized():  # the job has not left it
                world.close()
            pipe.send(("", result))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
