"""A state whose tensors stay in the files of a checkpoint until somebody asks for one, and are not kept then.

Where not all of a state fits at once it is checked, and taken over, one tensor after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...stages.tensor_file import TensorFile


class Unread(NamedTuple):
    """A tensor of a file."""

    file: TensorFile
    name: str


class OnDemand(Mapping[str, Any]):
    """A mapping that reads a tensor anew whenever it is asked for."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        """``found``: has an ``Unread`` in the place of each tensor."""
        self._found = found

    def __getitem__(self, key: str) -> Any:
        """What is there, read if it is a tensor.

        Raises: CheckpointError: its bytes were altered, or cannot be read."""
        item = self._found[key]
        return item.file.read(item.name) if isinstance(item, Unread) else item

    def __iter__(self) -> Iterator[str]:
        """The keys; nothing is read."""
        return iter(self._found)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._found)


def on_demand(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with ``Unread`` tensors as one that reads them."""
    optimizer = {
        name: {part: OnDemand(items) for part, items in kept.items()}
        for name, kept in state["optimizer"].items()
    }
    return {**state, "model": OnDemand(state["model"]), "optimizer": optimizer}
