"""Weight stashing: several versions of a stage's parameters at once, each kept until nobody can ask for it.

Which version a micro-batch runs with is the closed form of its ``VersionRule``; how long a version is kept
follows from the same form and the order of the schedule, so no program names one.
Source: PipeDream (Narayanan et al., SOSP 2019, section 3.3)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...compression.errors import StageError
from ..memory.stores import UNLIMITED, StoreOptions, open_store
from .policies import VersionRule, WeightPolicy
from .versions import NoStashing, Version, WeightVersions, copy_of


def versions_of(
    policy: WeightPolicy,
    parameters: Iterable[torch.nn.Parameter],
    *,
    stage: int,
    num_stages: int,
    options: StoreOptions = UNLIMITED,
) -> WeightVersions:
    """Return the versions that ``policy`` asks for of the parameters that ``stage`` of ``num_stages`` owns.

    Args:    options: what the store of versions that wait is opened with.
    Raises:  PlanError: parameters of which there are versions share their memory."""
    if policy.rule is None:
        return WeightVersions()
    placed: dict[str, Any] = {"parameters": parameters, "stage": stage, "num_stages": num_stages}
    if policy.rule.delay:
        return WeightStashing(policy.rule, policy, options=options, **placed)
    return NoStashing(policy.rule, policy, **placed)


class WeightStashing(NoStashing):
    """A micro-batch runs forward and backward with the same version; predicted, with what its forward saw."""

    def __init__(
        self, rule: VersionRule, policy: WeightPolicy, *, options: StoreOptions, **placed: Any
    ) -> None:
        """Keep versions in the policy's tier while no instruction reads them."""
        self.store = None if policy.tier == "device" else open_store(policy.tier, options)
        super().__init__(rule, policy, **placed)

    def _start(self) -> None:
        super()._start()
        self.newest = self._version(0, ours=False)  # by now a person may look into the parameters' memory
        self.kept: dict[int, Version] = {}
        self.running: dict[int, Version] = {}  # by micro-batch between its forward and done
        self.next = 0  # the update that the next forward belongs to, or a later one
        self.most = 0  # updates that there can be when it comes
        self.spare: list[Tensor] = []  # the memory of the last version dropped: fresh pages cost a copy more

    def _version(self, number: int, tensors: Iterable[Tensor] = (), *, ours: bool = True) -> Version:
        return Version(number, tensors, ours=ours, store=self.store)

    @property
    def num_live(self) -> int:
        """Distinct versions that are kept now, the newest among them."""
        return 1 + len(self.older)

    @property
    def num_bytes(self) -> int:
        """Bytes of the versions beside the newest, which is in place."""
        return sum(version.num_bytes for version in self.older)

    @property
    def older(self) -> list[Version]:
        """All versions but the newest: those that the schedule will ask for, and those in flight."""
        found = {id(version): version for version in (*self.kept.values(), *self.running.values())}
        found.pop(id(self.newest), None)
        return list(found.values())

    @contextlib.contextmanager
    def backward(self, micro_batch: int) -> Iterator[None]:
        """The block in which its backward runs, with the weights of its forward."""
        with super().backward(micro_batch), self._placed(self._of(micro_batch)):
            yield

    def fetch(self, micro_batch: int) -> None:
        """Begin to bring back the version of ``micro_batch``."""
        self._of(micro_batch).fetch()

    def done(self, micro_batch: int) -> None:
        """Forget the version of ``micro_batch`` if it was the last that needs it."""
        super().done(micro_batch)
        version = self.running.pop(micro_batch, None)
        self._forget()
        if version is not None and all(version is not other for other in (*self.older, self.newest)):
            self.spare = version.drop() or self.spare

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """The block in which an optimizer writes the parameters, in a copy if their version is read again."""
        old = self.newest
        if self._needed(old, old.number + 1):
            old.tensors = [p.data for p in self.parameters]
            self.kept[old.number] = old
            self._exchange(self._copies(old.tensors))
            old.leave()
        with super().update():
            yield
        self.newest = self._version(old.number + 1, ours=old.ours or old.number in self.kept)
        self._forget()

    def drained(self) -> None:
        """Nothing is in flight: keep the newest version only, and count from 0 again."""
        for version in self.older:
            version.drop()
        super().drained()

    def _of(self, micro_batch: int) -> Version:
        if micro_batch not in self.running:
            raise StageError(
                f"the weights of micro-batch {micro_batch} are kept from its forward to its last backward, "
                f"found those of {sorted(self.running)}; run its forward first, and nothing after done"
            )
        return self.running[micro_batch]

    @contextlib.contextmanager
    def _in_place(self, micro_batch: int) -> Iterator[None]:
        update = self.update_of[micro_batch]
        version = self.running[micro_batch] = self._asked(micro_batch, update)
        if self.rule.per_batch:  # the next forward is of this batch, or of one that begins before its update
            self.next, self.most = update, update + (self.num_stages == 1)
        else:
            self.next, self.most = update + 1, max(0, update + 2 - self.num_stages + self.stage)
        self._forget()
        with self._placed(version):
            yield

    def _asked(self, micro_batch: int, update: int) -> Version:
        number = self.rule.version(update, self.stage, self.num_stages)
        version = self.newest if number == self.newest.number else self.kept.get(number)
        if version is None:
            raise StageError(
                f"micro-batch {micro_batch} runs with the weights after {number} updates, kept are "
                f"{sorted((*self.kept, self.newest.number))}; run forwards, backwards and updates in the "
                "order of the schedule"
            )
        if not (predicted := self._predicted(micro_batch)):
            return version
        tensors = {id(p): copy_of(p.data) for p in self.parameters}
        for parameter, move in predicted:
            move(tensors[id(parameter)])
        return self._version(number, tensors.values())

    def _needed(self, version: Version, newest: int) -> bool:
        """Whether ``version`` is read again when there are ``newest`` updates."""
        if any(version is other for other in self.running.values()):
            return True
        following = self.rule.version(max(self.next, newest), self.stage, self.num_stages)
        return newest <= self.most and version.number >= following

    def _forget(self) -> None:
        for version in list(self.kept.values()):
            if not self._needed(version, self.newest.number):
                self.spare = self.kept.pop(version.number).drop() or self.spare

    def _copies(self, tensors: list[Tensor]) -> list[Tensor]:
        spare, self.spare = self.spare, []
        if not spare:
            return [copy_of(tensor) for tensor in tensors]
        for new, old in zip(spare, tensors, strict=True):
            new.copy_(old)
        return spare

    @contextlib.contextmanager
    def _placed(self, version: Version) -> Iterator[None]:
        if version is self.newest:
            yield
            return
        newest = [p.data for p in self.parameters]
        version.bring()
        self._exchange(version.tensors)
        try:
            yield
        finally:
            self._exchange(newest)
            version.leave()

    def _exchange(self, tensors: Iterable[Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor
