"""What ranks leave for each other in the store of their group: why one stops, and that one still runs.

The store may have gone with the rank or the link that held it, and torch's look-ups in such a store never
return. So each runs in a thread that is given a moment, and after one that got stuck no other is tried."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

MOMENT = 1.5
"""Seconds that a look-up in the store may take, of which ranks have one to give a sign of life."""

_SIGN_SECONDS = 1.0
_ASKING = "penstock-store"

T = TypeVar("T")


def bounded(call: Callable[[], T], *, seconds: float) -> T:
    """What ``call`` returns or raises, if it does within ``seconds``.

    Raises: TimeoutError: it does not, or an earlier one still has not; it is left to itself.
    """
    # A thread that is stuck is the memory of it: the store did not answer once.
    if any(thread.name == _ASKING for thread in threading.enumerate()):
        raise TimeoutError("the store of the ranks did not answer before")
    answers: list[T] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask, name=_ASKING, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"the store of the ranks did not answer within {seconds:g} s")
    return answers[0]


def leave(sentence: str) -> None:
    """Tell the other ranks why this one stops."""
    _ask(lambda: _store().set(f"failed/{dist.get_rank()}", sentence), otherwise=None)


def of_others() -> str:
    """What ranks that failed left word of; "" if none did."""

    def look() -> str:
        store = _store()
        keys = [f"failed/{other}" for other in _others()]
        return "; ".join(store.get(key).decode(errors="replace") for key in keys if store.check([key]))

    return _ask(look, otherwise="")


def why(error: RuntimeError) -> str:
    """Why a wait for all ranks failed: in the words of one that failed, else who gives no sign of life."""
    told = of_others()
    if told:
        return told
    quiet = _ask(lambda: silent(_store(), f"lost/{dist.get_rank()}", "lost", _others()), otherwise=_others())
    who = f"{ranks_named(quiet)} did not answer: " if quiet else ""
    return f"{who}{of_gloo(error)}"


def silent(store: Store, sign: str, kind: str, others: Collection[int]) -> list[int]:
    """Leave ``sign``; return which of ``others`` leave neither one of its ``kind`` nor word of a failure."""
    store.set(sign, "")
    until = time.monotonic() + _SIGN_SECONDS
    while True:
        left = [o for o in others if not (store.check([f"{kind}/{o}"]) or store.check([f"failed/{o}"]))]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.02)


def ranks_named(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 3 and 4``."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def of_gloo(error: BaseException) -> str:
    """What gloo says of a failed transfer, less its source line and its advice."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).split(". ")[0]


def _ask(look: Callable[[], T], *, otherwise: T) -> T:
    try:
        return bounded(look, seconds=MOMENT)
    except Exception:  # the store has gone with the rank that held it; the error itself travels on
        return otherwise


def _others() -> list[int]:
    return [other for other in range(dist.get_world_size()) if other != dist.get_rank()]


def _store() -> Store:
    return distributed_c10d._get_default_store()
