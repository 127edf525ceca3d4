"""Streams next to the computing of a device: work on streams, and how others wait for it.

On a CPU all of it is done where it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class Work(Generic[T]):
    """Something that a stream does, and the ``value`` it returns; this one is done.

    ``value`` may be handed to other work behind this one at once, and be read once somebody has waited."""

    def __init__(self, value: T) -> None:
        """Work that was done where it was submitted."""
        self.value = value

    def wait(self) -> None:
        """Let this thread wait until it is done."""

    @property
    def done(self) -> bool:
        """Return whether nobody need wait for it."""
        return True


class Stream:
    """Does what is submitted, in that order, beside the computing; that of a CPU does it at once."""

    def submit(
        self, task: Callable[[], T], *, after: Iterable[Work[Any]] = (), reads: Iterable[Tensor] = ()
    ) -> Work[T]:
        """Do ``task`` behind the work ``after``, and never wait here.

        Args:    reads: tensors made where the device computes, whose memory must stay until it is done."""
        return Work(task())
