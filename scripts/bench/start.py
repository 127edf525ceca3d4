"""Start the ranks of a bench, each where its end of the link is, and tell one cause when they fail.

torch's elastic launcher, which trains, starts all ranks in one place; here each may have its own network."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ...pipeline.failure import cause, read_failures
from .links import Link

PORT = 29400
"""Where rank 0 listens in a network of its own, which has every port free."""

_LAST_WORDS_SECONDS = 3.0
"""How long the others may take to say what they were waiting for, once a rank has failed."""


def run_ranks(
    module: str, arguments: Sequence[str], *, link: Link, ends: Sequence[Sequence[str]], errors: Path
) -> None:
    """Run ``python -m module *arguments`` once for each of ``ends`` and wait until all have ended.

    Args:   ends: for each rank, the command that runs another one at its end of the link.
            errors: the folder where ``run_rank`` leaves sentences.
    Raises: PenstockError: the first cause among the failures. No rank is left running, whatever is raised.
    """
    port = PORT if link.rate is not None else _free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, prefix in enumerate(ends):
            environment = os.environ | _surroundings(link, rank=rank, ranks=len(ends), port=port)
            # -P and PYTHONPATH: the ranks find modules where this process does, the user's own included.
            command = [*prefix, sys.executable, "-P", "-m", module, *arguments]
            # In a session of its own, a rank does not hear Ctrl-C and has nothing to say of it; we end it.
            ranks.append(subprocess.Popen(command, env=environment, start_new_session=True))
        codes = _wait(ranks)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    if failed := {rank: code for rank, code in enumerate(codes) if code}:
        raise cause(failed, read_failures(errors), stages_of_rank=[[rank] for rank in range(len(ends))])


def _surroundings(link: Link, *, rank: int, ranks: int, port: int) -> dict[str, str]:
    """What tells a rank who it is and where to meet the others."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": link.address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": link.device,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # addresses in a namespace have no names, and torch warns of it
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for all ranks, or a moment longer than the first failure; return their exit codes, 0 if alive."""
    until = float("inf")
    while None in (codes := [process.poll() for process in ranks]) and time.monotonic() < until:
        if any(codes):
            until = min(until, time.monotonic() + _LAST_WORDS_SECONDS)
        time.sleep(0.05)
    return [code or 0 for code in codes]


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]
