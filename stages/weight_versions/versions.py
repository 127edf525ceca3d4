"""The weights of one stage at run time: one version, or several, each kept until nobody can ask for it.

``p.data = version`` exchanges the memory behind a parameter and copies nothing. What autograd saved of it
finds its version again: a view (``weight.t()``) holds its memory, a parameter itself is read when it is asked
for, so its version is in place during the backward. An optimizer writes in place, into a copy if something
still needs what it would overwrite, and its writes are not counted: autograd would take them for a mistake.
Source: PipeDream (Narayanan et al., SOSP 2019, section 3.3: weight stashing, vertical sync); PipeDream-2BW
        (Narayanan et al., ICML 2021, section 3: double-buffered updates)."""

# ruff: noqa: D102 (methods are those of WeightVersions)

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ...compression.buffers import Frame
from ...compression.codec import decode, encode
from ...compression.errors import PlanError, StageError
from ..memory.evictable_tensor import EvictableTensor
from ..memory.packer import FOR_SAVED
from ..memory.parameter_offload import OffloadedParameters, OffloadedVersion
from ..memory.saved_storage import Bytes, row_view, view_of
from ..memory.stores import UNLIMITED, Store, StoreOptions, UnpooledBuffers, open_store
from ..torch_private import preserve_version_counter
from .policies import VersionRule, WeightPolicy

Settings = dict[str, Any]
Gradients = list[EvictableTensor | Tensor | None]  # of parameters, of which some wait in a store


def _sgd(weight: Tensor, *, state: Settings, group: Settings, times: int) -> None:
    weight.sub_(state["momentum_buffer"], alpha=times * _rate(group))


def _adam(weight: Tensor, *, state: Settings, group: Settings, times: int) -> None:
    count, (beta1, beta2) = float(state["step"]), map(float, group["betas"])
    mean = state["exp_avg"]
    square = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    if weight.is_complex():
        weight, mean, square = map(torch.view_as_real, (weight, mean, square))
    root = (square.sqrt() / (1 - beta2**count) ** 0.5).add_(group["eps"])
    weight.addcdiv_(mean, root, value=-(times * _rate(group) / (1 - beta1**count)))


def _rate(group: Settings) -> float:
    return float(group["lr"]) * (-1 if group["maximize"] else 1)


# Steps that an optimizer is expected to make from its state, without a new gradient: a forward that is d
# updates older than its backward runs with w - d * (that step), without decoupled weight decay. Source:
# SpecTrain (Chen et al., arXiv 1809.02839, section 3: momentum); PipeOptim (Guan et al., arXiv 2312.00839).
STEPS: dict[type[Optimizer], Callable[..., None]] = {SGD: _sgd, Adam: _adam, AdamW: _adam}


class StashedVersion:
    """The values of all parameters after ``number`` updates; it never changes, so it is packed once.

    ``tensors`` is empty while they are the parameters' own; those that shrink wait in the ``store``, if there
    is one. ``ours``: nobody else looks into their memory."""

    def __init__(
        self, number: int, tensors: Iterable[Tensor] = (), *, ours: bool = True, store: Store | None
    ) -> None:
        self.number, self.tensors, self.ours, self.store = number, list(tensors), ours, store
        self._frames: dict[int, tuple[object, int]] = {}  # by place in tensors: key and bytes
        self.offloaded: OffloadedVersion | None = None  # of parameters that wait in a store of their own
        self._packed = self._away = False

    @property
    def num_bytes(self) -> int:
        """Bytes of its frames, and of the tensors that are in memory."""
        here = (t.untyped_storage().nbytes() if self._own(t) else t.nbytes for t in self.tensors)
        return sum(here) + sum(num_bytes for _, num_bytes in self._frames.values())

    def leave(self) -> None:
        """No instruction reads it for a while: pack what shrinks, the first time, and free its memory."""
        if not self._packed and self.store is not None:
            self._packed = True
            for place, tensor in enumerate(self.tensors):
                if self._own(tensor):
                    frame = encode(_flat(tensor), FOR_SAVED)
                    num_bytes = frame.numel()
                    away = self.store.offloads_from(tensor.device)
                    if away or num_bytes < tensor.untyped_storage().nbytes():
                        self._frames[place] = object(), num_bytes
                        self.store.put(self._frames[place][0], Frame(frame, num_bytes, UnpooledBuffers()))
        for place in self._frames:
            self.tensors[place].untyped_storage().resize_(0)
        self._away = True

    def fetch(self) -> None:
        """An instruction reads it soon: begin to bring the frames back to the device."""
        if self._away and self.store is not None:
            for key, _ in self._frames.values():
                self.store.fetch(key)

    def bring(self) -> None:
        """An instruction reads it now: fill the memory again, under all views of it."""
        if self._away and self.store is not None:
            for place, (key, _) in self._frames.items():
                _fill(self.tensors[place], self.store.get(key))
        self._away = False

    def drop(self) -> list[Tensor]:
        """Nothing reads it again: forget the frames; returns tensors whose memory may be written anew."""
        if self.offloaded is not None:
            self.offloaded.drop()
            self.offloaded = None
        if self.store is None:
            return self.tensors if self.ours else []
        for key, _ in self._frames.values():
            self.store.drop(key)
        self._frames.clear()
        return []

    def _own(self, tensor: Tensor) -> bool:
        """Return whether a tensor is all of its memory, which nobody else knows."""
        return self.ours and tensor.untyped_storage().resizable()


def copy_of(tensor: Tensor) -> Tensor:
    """The same values at the same strides, in new memory that begins like any tensor's."""
    new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return new.copy_(tensor)


def _flat(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    dtype, storage = dtype or tensor.dtype, tensor.untyped_storage()
    return row_view(storage.nbytes() // dtype.itemsize, dtype).over(Bytes(storage, 0))


def _fill(tensor: Tensor, frame: Frame) -> None:
    tensor.untyped_storage().resize_(view_of(tensor).num_bytes)
    if frame.buffer.is_cuda:
        flat = decode(frame.bytes)
        assert flat is not None, "a version has values"
        _flat(tensor).copy_(flat)
    else:
        decode(frame.bytes, _flat(tensor, torch.uint8))


class WeightVersions:
    """One version of a stage's weights, of which a schedule with a flush reads nothing while it is updated.

    Layers run inside ``forward`` of their micro-batch, its backward inside ``backward``, an optimizer inside
    ``update``. Buffers (the running statistics of BatchNorm) have no versions: forwards write them, and every
    schedule runs those in ascending order."""

    num_live, num_bytes = 1, 0  # versions that are kept now, and bytes of all but the newest
    moves = False  # parameters have other values behind a forward than in it, or none
    _nothing = contextlib.nullcontext()

    def bind(self, optimizer: Optimizer) -> None:
        """Tell of the optimizer of these parameters; PlanError if it should be predicted and cannot be."""

    def forward(self, micro_batch: int, batch: int) -> contextlib.AbstractContextManager[None]:
        """The block in which the layers of ``micro_batch`` run, with its weights; a drain ends a
        ``batch``."""
        return self._nothing

    def backward(self, micro_batch: int) -> contextlib.AbstractContextManager[None]:
        """The block in which its B, or its I or W, runs; the gradients of its update gather in ``.grad``."""
        return self._nothing

    def fetch(self, micro_batch: int) -> None:
        """Ahead of ``backward``: begin to bring back the version it needs."""

    def done(self, micro_batch: int) -> None:
        """Nothing needs the weights of ``micro_batch`` any more: after its B or W."""

    def due(self) -> None:
        """Ahead of ``update``, on all stages: put the gradients of the oldest whole update into ``.grad``."""

    def update(self) -> contextlib.AbstractContextManager[None]:
        """The block in which an optimizer writes the parameters: versions still needed are kept first. Behind
        it ``.grad`` holds what the next update has gathered, None where that is nothing."""
        return self._nothing

    def drained(self) -> None:
        """Nothing is in flight: count micro-batches, batches and updates from 0 again."""


class LatestWeights(WeightVersions):
    """One version, written in place: a backward sees newer weights than its forward did. A predicted forward
    moves the weights in place and puts them back."""

    moves = True

    def __init__(
        self, rule: VersionRule, policy: WeightPolicy, *,
        parameters: Iterable[torch.nn.Parameter], stage: int, num_stages: int,
        mirror: OffloadedParameters | None = None,
    ) -> None:  # fmt: skip
        """Keep those ``parameters`` that an optimizer may write; ``mirror`` has those that are offloaded."""
        self.mirror, self.written = mirror, [p for p in parameters if p.requires_grad]
        offloaded = {id(p) for turn in (mirror.turns if mirror else ()) for p in turn}
        self.parameters = [p for p in self.written if id(p) not in offloaded]
        self.offloaded = [p for p in self.written if id(p) in offloaded]
        self.rule, self.stage, self.num_stages = rule, stage, num_stages
        self._predicts, self._optimizer = policy.prediction, cast("Optimizer | None", None)
        places = [p.data_ptr() for p in self.written if p.numel()]
        if len(set(places)) < len(places):
            raise PlanError(
                f"versions of the weights need parameters in memory of their own, found {len(places)} in "
                f"{len(set(places))} places; make shared ones one parameter"
            )
        self._start()

    def _start(self) -> None:
        self.update_of: dict[int, int] = {}  # by micro-batch between its forward and done
        self.gathering = 0  # the update whose gradients are in .grad
        self.whole: Gradients | None = None  # of an update, until it is due
        self.begun: Gradients | None = None  # those of the next update, during one

    def bind(self, optimizer: Optimizer) -> None:
        if self._predicts and type(optimizer) not in STEPS:
            raise PlanError(
                f"prediction knows {', '.join(kind.__name__ for kind in STEPS)}, found "
                f"{type(optimizer).__name__}; choose one of these, or prediction=false"
            )
        if self._predicts and any(not group.get("momentum", 1) for group in optimizer.param_groups):
            raise PlanError("prediction continues the momentum of SGD, found momentum=0; set one")
        self._optimizer = optimizer

    @contextlib.contextmanager
    def forward(self, micro_batch: int, batch: int) -> Iterator[None]:
        self.update_of[micro_batch] = batch if self.rule.per_batch else micro_batch
        with self._in_place(micro_batch):
            yield

    @contextlib.contextmanager
    def backward(self, micro_batch: int) -> Iterator[None]:
        update = self.update_of.get(micro_batch, self.gathering)
        if update != self.gathering:
            self.gathering = update  # older gradients are set aside until all stages are through with them
            assert self.whole is None, "a stage is ahead of the others by less than a batch"
            self.whole = self._exchange_gradients(None)
        yield

    def done(self, micro_batch: int) -> None:
        self.update_of.pop(micro_batch, None)

    def due(self) -> None:
        if self.whole is not None:
            self.begun, self.whole = self._exchange_gradients(self.whole), None

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        try:
            with preserve_version_counter(tuple(self.written)):
                yield
        finally:
            if self.mirror is not None:
                self.mirror.uncounted()
        self.gathering += self.begun is None
        _discard(self._exchange_gradients(self.begun))  # None, not zeros: sums that start there lose -0.0
        self.begun = None

    def drained(self) -> None:
        for gradients in (self._exchange_gradients(None), self.whole, self.begun):
            _discard(gradients or ())
        self._start()

    def _exchange_gradients(self, gradients: Gradients | None) -> Gradients:
        before: Gradients = [p.grad for p in self.parameters]
        for place, parameter in enumerate(self.parameters):
            parameter.grad = cast("Tensor | None", gradients[place] if gradients else None)
        if self.mirror is not None:
            before += self.mirror.take_gradients(self.offloaded)
            if gradients:
                self.mirror.give_gradients(self.offloaded, gradients[len(self.parameters) :])
        return before

    def _predicted(self, micro_batch: int) -> list[tuple[torch.nn.Parameter, Callable[[Tensor], None]]]:
        """Return the parameters that prediction moves, by as many updates as come between the forward and its
        backward, each with what moves its values."""
        times = min(micro_batch, self.num_stages - 1 - self.stage)
        if not (self._predicts and self.parameters and times):
            return []
        if self._optimizer is None:
            raise StageError("prediction reads an optimizer, found none; bind one before the first forward")
        step, states = STEPS[type(self._optimizer)], self._optimizer.state
        return [
            (p, functools.partial(step, state=states[p], group=group, times=times))
            for group in self._optimizer.param_groups
            for p in group["params"]
            if states.get(p) and states[p].get("momentum_buffer", 0) is not None
        ]

    @contextlib.contextmanager
    def _in_place(self, micro_batch: int) -> Iterator[None]:
        predicted = self._predicted(micro_batch)
        real = [copy_of(parameter.data) for parameter, _ in predicted]
        try:
            for parameter, move in predicted:
                move(parameter.data)
            yield
        finally:
            for (parameter, _), values in zip(predicted, real, strict=True):
                parameter.data.copy_(values)


def _discard(gradients: Iterable[EvictableTensor | Tensor | None]) -> None:
    for one in gradients:
        if isinstance(one, EvictableTensor):
            one.drop()


def versions_of(
    policy: WeightPolicy, parameters: Iterable[torch.nn.Parameter], *, stage: int, num_stages: int,
    options: StoreOptions = UNLIMITED, mirror: OffloadedParameters | None = None,
) -> WeightVersions:  # fmt: skip
    """Return the versions of ``parameters`` that ``policy`` asks for; PlanError if they share memory. Those
    that wait are in a store opened with ``options``, or where ``mirror`` has the parameters."""
    if policy.rule is None:
        return WeightVersions()
    kind = functools.partial(WeightStashing, options=options) if policy.rule.delay else LatestWeights
    return kind(policy.rule, policy, parameters=parameters, stage=stage, num_stages=num_stages, mirror=mirror)


class WeightStashing(LatestWeights):
    """A micro-batch runs forward and backward with the same version; predicted, with what its forward saw."""

    def __init__(
        self, rule: VersionRule, policy: WeightPolicy, *, options: StoreOptions, **placed: Any
    ) -> None:
        self.store = None if policy.tier == "device" else open_store(policy.tier, options)
        super().__init__(rule, policy, **placed)

    def _start(self) -> None:
        super()._start()
        self.newest = self._version(0, ours=False)  # by now a person may look into the parameters' memory
        self.kept: dict[int, StashedVersion] = {}
        self.running: dict[int, StashedVersion] = {}  # by micro-batch between its forward and done
        self.next = 0  # the update that the next forward belongs to, or a later one
        self.most = 0  # updates that there can be when it comes
        self.spare: list[Tensor] = []  # the memory of the last version dropped: fresh pages cost a copy more

    def _version(self, number: int, tensors: Iterable[Tensor] = (), *, ours: bool = True) -> StashedVersion:
        return StashedVersion(number, tensors, ours=ours, store=self.store)

    @property
    def num_live(self) -> int:
        return 1 + len(self.older)

    @property
    def num_bytes(self) -> int:
        return sum(version.num_bytes for version in self.older)

    @property
    def older(self) -> list[StashedVersion]:
        """All versions but the newest: those that the schedule will ask for, and those in flight."""
        found = {id(version): version for version in (*self.kept.values(), *self.running.values())}
        found.pop(id(self.newest), None)
        return list(found.values())

    @contextlib.contextmanager
    def backward(self, micro_batch: int) -> Iterator[None]:
        with super().backward(micro_batch), self._placed(self._of(micro_batch)):
            yield

    def fetch(self, micro_batch: int) -> None:
        self._of(micro_batch).fetch()

    def done(self, micro_batch: int) -> None:
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
            if self.mirror is not None:
                old.offloaded = OffloadedVersion(self.mirror)
        with super().update():
            yield
        self.newest = self._version(old.number + 1, ours=old.ours or old.number in self.kept)
        self._forget()

    def drained(self) -> None:
        for version in self.older:
            version.drop()
        super().drained()

    def _of(self, micro_batch: int) -> StashedVersion:
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

    def _asked(self, micro_batch: int, update: int) -> StashedVersion:
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

    def _needed(self, version: StashedVersion, newest: int) -> bool:
        """Return whether ``version`` is read again when there are ``newest`` updates."""
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
        pairs = zip(spare, tensors, strict=True) if spare else ()
        return [new.copy_(old) for new, old in pairs] or [copy_of(tensor) for tensor in tensors]

    @contextlib.contextmanager
    def _placed(self, version: StashedVersion) -> Iterator[None]:
        if version is self.newest:
            yield
            return
        newest = [p.data for p in self.parameters]
        version.bring()
        self._exchange(version.tensors)
        try:
            with version.offloaded.in_place() if version.offloaded else contextlib.nullcontext():
                yield
        finally:
            self._exchange(newest)
            version.leave()

    def _exchange(self, tensors: Iterable[Tensor]) -> None:
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            parameter.data = tensor
