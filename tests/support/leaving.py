"""Start and end a group of two ranks again and again, each in new processes that end as a script does.

    python tests/support/leaving.py 300

prints how often a process ended with which code: ``{0: 600}`` is all well, -6 is an abort."""

import collections
import os
import shutil
import sys
import tempfile

import torch
import torch.distributed as dist

from penstock.pipeline.distributed.process_group import init_group

RANKS = 2


def live(rank: int, path: str) -> None:
    """Run a rank from its start to its end."""
    store = dist.FileStore(path)  # pyright: ignore[reportPrivateImportUsage]
    world = init_group(store, rank=rank, ranks=RANKS, deadline=60)
    others = [(rank + 1) % RANKS, (rank - 1) % RANKS]
    passed = [dist.isend(torch.ones(1000), others[0]), dist.irecv(torch.empty(1000), others[1])]
    for work in passed:
        assert work is not None
        work.wait()
    assert world.all_gather_json(rank) == list(range(RANKS))
    world.close()


def ends(number: int) -> dict[int, int]:
    """Exit codes of the processes of so many groups, and how often each came."""
    codes: collections.Counter[int] = collections.Counter()
    for _ in range(number):
        folder = tempfile.mkdtemp()  # no ``with``, which every process would leave
        pids = []
        for rank in range(RANKS):
            if not (pid := os.fork()):  # torch is imported already, which takes seconds
                live(rank, os.path.join(folder, "store"))
                sys.exit(0)
            pids.append(pid)
        codes.update(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
        shutil.rmtree(folder)
    return dict(codes)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    print(ends(int(sys.argv[1])))
