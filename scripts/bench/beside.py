"""Processes beside a bench: they begin quickly, say that they have, and end with whoever began them."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

from ...compression.errors import TransportError


@contextlib.contextmanager
def beside(name: str, run: Callable[..., None], *arguments: Any) -> Iterator[None]:
    """A process of that name that does ``run(*arguments, life)``, says so through ``life``, and ends when
    that is closed.

    Raises: TransportError: it does not begin."""
    ours, life = processes().Pipe()
    process = processes().Process(target=run, args=(*arguments, life), name=name, daemon=True)
    process.start()
    life.close()
    try:
        try:
            ours.recv()
        except EOFError:
            raise TransportError(f"the {name} did not begin; see what it said above") from None
        yield
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()


def processes() -> Any:
    """How processes of a bench begin: from one that has imported torch already, and nothing else of ours."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["penstock.pipeline.samples.shared"])
    return found
