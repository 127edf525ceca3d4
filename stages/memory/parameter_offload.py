"""The mirror of a stage's parameters: a store has their master copy, and few of them are resident at a time.

    forward    a layer's parameters come before it and leave after it
    backward   they come when the first of its nodes reads them, or when their gradient has been computed;
               a gradient leaves as soon as it was added, and its parameter with it
    update     layer by layer: parameters, gradients and what the optimizer keeps of them come, and leave;
               piece by piece, where the optimizer updates every element by itself

What autograd saved of a parameter is a note of where it lies in it: who reads the note has it brought.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.optim import Optimizer

from ...compression.errors import StageError
from ..torch_private import gradient_hooks, memory_id, version_of
from ..tracing.dataflow import Probe
from ..tracing.layers import Layer, Parts, Traced
from .evictable_tensor import EvictableTensor, TensorStore, hollow, may_leave
from .saved_storage import TensorView, bytes_around, empty, is_elements, refuse_written, view_of
from .stores import Store


def readers_of(
    runs: Iterable[tuple[Traced, Sequence[Layer], Parts, Probe]], own: Collection[int]
) -> dict[str, list[Parameter]]:
    """Return by name of a layer, in running order, the parameters that it reads and that may be away else, of
    the stage's ``own`` (by identity). ``runs``: of every mode its trace, layers, parts and record."""
    readers: dict[str, dict[int, Parameter]] = {}
    stays: set[int] = set()
    for traced, layers, parts, record in runs:
        # gradients of sparse ones are added and updated otherwise
        inner = (m for module in parts.modules.values() for m in module.modules())
        stays |= {id(p) for m in inner if getattr(m, "sparse", False) is True for p in m.parameters()}
        for name, parameters in _reads(traced, layers, parts, record, stays).items():
            readers.setdefault(name, {}).update((id(p), p) for p in parameters)
    return {
        name: [p for key, p in read.items() if key in own and key not in stays]
        for name, read in readers.items()
    }


def without_resident(readers: Mapping[str, list[Parameter]], num_bytes: int) -> dict[str, list[Parameter]]:
    """The same without parameters that stay: those of whole layers, the smallest first, while they fit: many
    small ones cost more to move than few large ones."""
    seen: set[int] = set()
    first_read: list[list[Parameter]] = []
    for parameters in readers.values():
        first_read.append([p for p in parameters if id(p) not in seen])
        seen |= {id(p) for p in parameters}
    stays: set[int] = set()
    for parameters in sorted(first_read, key=_num_bytes):
        if (num_bytes := num_bytes - _num_bytes(parameters)) < 0:
            break
        stays |= {id(p) for p in parameters}
    return {name: [p for p in read if id(p) not in stays] for name, read in readers.items()}


def _num_bytes(parameters: Iterable[Parameter]) -> int:
    return sum(p.nbytes for p in parameters)


def _reads(
    traced: Traced, layers: Sequence[Layer], parts: Parts, record: Probe, stays: set[int]
) -> dict[str, list[Parameter]]:
    """Return what the layers read; ``stays`` grows by what others look at."""
    read: dict[fx.Node, list[Parameter]] = {layer.node: directly_read(layer, parts) for layer in layers}
    number_of = {layer.node: n for n, layer in enumerate(traced.layers)}
    for node in read:
        for value in (record.values[number] for number in record.outputs[node].values):
            if not value.parameter or value.producer != number_of[node]:
                continue
            if node.op != "get_attr":  # it returns one of those that it reads, and nobody knows which
                stays |= {id(p) for p in read[node]}
                continue
            parameter = parts.tensors[str(node.target)]
            assert isinstance(parameter, Parameter)
            for user in value.users:
                if user == len(traced.layers) or traced.layers[user].node not in read:
                    stays.add(id(parameter))
                else:
                    read[traced.layers[user].node].append(parameter)
    stays |= {id(p) for p in _given(traced.output, parts)}
    stays |= {id(p) for layer in layers if layer.name in record.keeping for p in read[layer.node]}
    return {layer.name: read[layer.node] for layer in layers}


def directly_read(layer: Layer, parts: Parts) -> list[Parameter]:
    """Return the parameters of the layer's module, and those that it is given."""
    node = layer.node
    if node.op == "get_attr":
        return []
    own = list(parts.modules[str(node.target)].parameters()) if node.op == "call_module" else []
    return [*own, *_given(node, parts)]


def _given(node: fx.Node, parts: Parts) -> list[Parameter]:
    named = [parts.tensors.get(str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    return [tensor for tensor in named if isinstance(tensor, Parameter)]


def sharing(tensors: Iterable[Tensor]) -> set[int]:
    """Return the identities of those that lie in the same memory as another one."""
    places: dict[int, set[int]] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            places.setdefault(memory_id(tensor), set()).add(id(tensor))
    return {key for keys in places.values() if len(keys) > 1 for key in keys}


Kept = Mapping[Any, Any]  # what an optimizer keeps of a parameter
Turn = Sequence[Parameter]
RESIDENT_LAYERS = 2  # that stay in a backward, where branches of a network take turns and there is room
NO_ROOM = "the store of a mirror has no room for a gradient; raise its budget"


class EvictableParameter:
    """A parameter, its gradient and what an optimizer keeps of it; begins resident, as it is."""

    def __init__(self, frames: TensorStore, parameter: Parameter, turn: int) -> None:
        self._frames, self.parameter, self.turn = frames, parameter, turn
        self.memory = EvictableTensor(frames, parameter.data)  # the place of its values in the store
        self._gradient: EvictableTensor | None = None
        self._prefetched, self._lock = cast("Tensor | None", None), threading.Lock()  # values brought ahead
        self._soon = False
        self._state: dict[Any, EvictableTensor] = {}
        self.version, self.is_resident = version_of(parameter), True
        self.hooks: tuple[Any, ...] = ()  # the first and the last on its gradient
        self.storage = memory_id(parameter)  # while it is resident: by that parts of it are known

    def resident_bytes(self, kept: Kept) -> int:
        """Bytes of all that which are resident."""
        items = self.parameter, self.parameter.grad, *kept.values()
        return sum(t.nbytes for t in items if isinstance(t, Tensor) and t.layout is torch.strided)

    @property
    def prefetched_bytes(self) -> int:
        """Bytes of its values that were brought ahead."""
        return 0 if (values := self._prefetched) is None else values.nbytes

    # -- its values, which are there to be read -----------------------------------------------------------

    def load(self, *, copies: bool = False, fresh: bool = False) -> None:
        """Its values come: as ``copies`` of what the store has, or ``fresh`` memory, to be written."""
        self._refuse_written()
        self._frames.ahead.check()
        with self._frames.exposed(), self._lock:
            values, self._prefetched = self._prefetched, None
            if fresh:
                values = self.memory.empty()
            elif values is None:
                values = self.memory.get()
            if copies:
                new = self.memory.empty()
                self.memory.flat(new).copy_(self.memory.flat(values))
                values = new
            self.parameter.data = values
            self.is_resident, self._soon = True, False
        self.storage = memory_id(self.parameter)

    def _refuse_written(self) -> None:
        if version_of(self.parameter) != self.version:
            raise StageError(
                "an offloaded parameter is written to while it is resident, found one of shape "
                f"{tuple(self.memory.like.shape)} and {self.parameter.dtype} that was written to while it "
                "was not; write to it inside of Pipeline.parameters_resident()"
            )

    def evicted(self, kept: Kept) -> Iterator[tuple[Tensor, EvictableTensor]]:
        """Yield of its values and what is kept of it what is away: the tensor, and where its bytes are."""
        if not self.is_resident:
            self._refuse_written()
            yield self.parameter, self.memory
        for key, memory in self._away(kept).items():
            yield kept[key], memory

    def _away(self, kept: Kept) -> dict[Any, EvictableTensor]:
        return {key: memory for key, memory in self._state.items() if memory.stored and key in kept}

    def evict(self) -> bool:
        """Its values leave; False: the store has no room for them."""
        version = version_of(self.parameter)
        if not self.memory.put(self.parameter.data, written=version != self.version):
            return False
        hollow(self.parameter)
        self.is_resident, self.version = False, version
        return True

    def fetch(self, *, gradient: bool) -> None:
        """Its values are wanted soon, and the ``gradient``."""
        if not self.is_resident:
            self.memory.fetch()
            if not self._soon and self.memory.takes_time:
                self._soon = True
                if self._frames.ahead.has_room:  # it is only ahead of its time
                    self._frames.ahead.submit(self._bring)
        if gradient and self._gradient is not None:
            self._gradient.fetch([0] if self.adds_in_store else None)

    def _bring(self) -> None:
        """In the thread of ``TensorStore``: have its values at hand; nobody writes to them before."""
        with self._lock:
            if self._soon and not self.is_resident:
                self._prefetched = self.memory.get()

    def forget_prefetched(self) -> None:
        """Its values are not wanted soon."""
        with self._lock:
            self._prefetched, self._soon = None, False

    # -- its gradient -------------------------------------------------------------------------------------

    def hook(self, *, first: Callable[[Tensor], None], last: Callable[[Tensor], None]) -> None:
        """Call ``first`` with a gradient ahead of all other hooks, which may read the parameter, ``last``
        behind."""
        if not self.hooks:
            ahead = self.parameter.register_hook(first)
            self.hooks = ahead, self.parameter.register_post_accumulate_grad_hook(last)
        on_gradient, on_sum = gradient_hooks(self.parameter)
        for key in [key for key in on_gradient if key != self.hooks[0].id]:
            on_gradient[key] = on_gradient.pop(key)  # behind ours
        on_sum[self.hooks[1].id] = on_sum.pop(self.hooks[1].id)

    @property
    def adds_in_store(self) -> bool:
        """Return whether a gradient is added in the store, piece by piece: nobody else looks at the sum."""
        if self._gradient is None or len(self._gradient.places) == 1:
            return False
        return [*map(len, gradient_hooks(self.parameter))] == [1, 1]  # ours

    def bring_gradient(self) -> None:
        """Bring what there is of its gradient, to be written; its values are resident."""
        if self._gradient is not None:
            self.parameter.grad = self._gradient.take()
            self._gradient = None

    def push_gradient(self) -> None:
        """Its gradient leaves; one that is not dense stays, and what finds no room."""
        gradient = self.parameter.grad
        if gradient is None:
            return
        if self._gradient is not None:  # it is to be added to what waits
            if may_leave(gradient, min_bytes=1) and _shape_of(gradient) == self._gradient.view:
                if not self._gradient.add(gradient):
                    raise StageError(NO_ROOM)
                self.parameter.grad = None
                return
            gradient = self.parameter.grad = self._gradient.take().add_(gradient)
            self._gradient = None
        if may_leave(gradient, min_bytes=1):
            memory = EvictableTensor(self._frames, gradient, like=self.memory)
            if memory.put(gradient):
                self._gradient, self.parameter.grad = memory, None

    def looked_at(self, gradient: Tensor | None, *, written: bool) -> None:
        """The gradient that was looked at leaves again."""
        if gradient is not None and self._gradient is not None:
            if not self._gradient.put(gradient, written=written):
                raise StageError(NO_ROOM)

    def forget_gradient(self) -> None:
        """It has no gradient any more."""
        if self._gradient is not None:
            self._gradient.drop()
            self._gradient = None

    @property
    def gradient(self) -> EvictableTensor | Tensor | None:
        """Its gradient, as it waits."""
        return self.parameter.grad if self._gradient is None else self._gradient

    def give_gradient(self, gradient: EvictableTensor | Tensor | None) -> None:
        """Have this gradient wait in the store, or none; raises StageError where it has no room."""
        self.parameter.grad = self._gradient = None
        if not isinstance(gradient, Tensor):
            self._gradient = gradient
            return
        plain = gradient.resolve_conj().resolve_neg()
        self._gradient = EvictableTensor(self._frames, plain, like=self.memory)
        self.looked_at(plain, written=True)

    # -- its versions -------------------------------------------------------------------------------------

    def swap(self, memory: EvictableTensor) -> EvictableTensor:
        """Have its values, which are not resident, be those of ``memory``; return where the others are."""
        with self._lock:
            before, self.memory = self.memory, memory
        return before

    # -- all of it, a piece at a time ---------------------------------------------------------------------

    def comes_in_pieces(self, kept: Kept) -> bool:
        """Return whether ``pieces`` has several: values, gradient and what is kept of it lie alike."""
        gradient, values = self._gradient, self.memory
        if self.is_resident or gradient is None or len(values.places) == 1:
            return False
        others = gradient, *self._away(kept).values()
        alike = all((one.view, one.places) == (values.view, values.places) for one in others)
        return alike and all(_shape_of(item) == values.view for item in kept.values() if _is_whole(item))

    def pieces(self, state: MutableMapping[Tensor, dict[Any, Any]], *, written: bool) -> Iterator[Parameter]:
        """Yield a parameter for each piece, with its gradient and its part of the optimizer's ``state``."""
        self._refuse_written()
        kept, part = state.get(self.parameter, {}), dict[Any, Any]()
        values, gradient, stored = self.memory, self._gradient, self._away(kept)
        assert gradient is not None, "comes_in_pieces() says so"
        new = dict[Any, EvictableTensor]()  # that the optimizer makes in this update
        for number, place in enumerate(values.places):
            # 1. a piece comes, while the store begins with the next one
            for memory in (values, gradient, *stored.values()):
                memory.fetch([number + 1])
            part = dict(kept)
            with self._frames.exposed():
                piece = Parameter(values.get_piece(number))
                piece.grad = gradient.get_piece(number)
                for key, item in kept.items():
                    if key in stored:
                        part[key] = stored[key].get_piece(number)
                    elif _is_whole(item):
                        part[key] = values.flat(item)[place]
                    elif isinstance(item, Tensor) and number + 1 < len(values.places):
                        part[key] = item.clone()  # a number of steps, which every piece counts
            # 2. it is updated
            if part:
                state[piece] = part
            yield piece
            part = state.pop(piece, {})
            # 3. it leaves
            leaving = [(values, piece.data)]
            if written and piece.grad is not None:
                leaving.append((gradient, piece.grad))
            for key, item in part.items():
                if key in kept and _is_whole(kept[key]):
                    values.flat(kept[key])[place].copy_(item)
                elif _is_whole(item):
                    if key not in stored and key not in new:
                        new[key] = values.alike()
                    leaving.append((stored.get(key) or new[key], item))
            if not all(memory.put_piece(number, elements) for memory, elements in leaving):
                raise StageError(NO_ROOM)
            del leaving
        self._state |= new
        for key, item in part.items():
            if _is_whole(item):  # of which there is no element now, unless it was resident
                there = kept.get(key)
                gone = empty(self.parameter.dtype, self.parameter.device)
                part[key] = there if isinstance(there, Tensor) else gone
        if part:
            state[self.parameter] = part

    # -- all of it, to be written -------------------------------------------------------------------------

    def pull(self, kept: Kept, *, is_shared: bool) -> None:
        """Gradient and what is kept come, to be written; ``is_shared``: an older version has the bytes,
        too."""
        self.bring_gradient()
        for key, memory in self._away(kept).items():
            kept[key].data = memory.take()
        if is_shared:
            self.memory = EvictableTensor(self._frames, self.parameter.data)
        else:
            self.memory.drop()

    def push(self, kept: Kept, *, min_bytes: int) -> None:
        """Gradient and what is kept of ``min_bytes`` or more leave, as they are now."""
        self.push_gradient()
        for key, item in kept.items():
            if _is_whole(item) and may_leave(item, min_bytes=min_bytes):
                memory = self._state[key] = EvictableTensor(self._frames, item, like=self.memory)
                if memory.put(item):
                    hollow(item)


def _is_whole(item: Any) -> TypeGuard[Tensor]:
    """Return whether this is kept for the elements of a parameter, and it is resident: no count."""
    return isinstance(item, Tensor) and item.dim() > 0 and item.numel() > 0


def _shape_of(tensor: Tensor) -> TensorView:
    return view_of(tensor)._replace(start=0)


class OffloadedVersion:
    """The values that offloaded parameters had once, which some micro-batches still read."""

    def __init__(self, mirror: OffloadedParameters) -> None:
        mirror.evict_all()
        self._mirror, self.memories = mirror, {one: one.memory for one in mirror.memories}
        mirror.versions.append(self)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The block in which layers read these values."""
        self._mirror.evict_all()
        newest = {one: one.swap(memory) for one, memory in self.memories.items()}
        try:
            yield
        finally:
            self._mirror.evict_all()
            for one, memory in newest.items():
                one.swap(memory)

    def drop(self) -> None:
        """Nobody reads it again: forget the values that no other version has, nor the parameters."""
        self._mirror.versions.remove(self)
        for one, memory in self.memories.items():
            if memory is not one.memory and not self._mirror.is_kept(one, memory):
                memory.drop()


class OffloadedParameters:
    """The parameters of one stage that may leave, by the layers that read them.

    Attributes: turns: in parts, layer by layer, of which an update takes one at a time.
                versions: older values that are still read; without any, an update may write in pieces."""

    def __init__(
        self, store: Store, *, readers: Mapping[str, Sequence[Parameter]], packs: bool, min_bytes: int,
        weights_first: bool = False, ahead: int = 1, stays: int = 0, prefetches: bool = True,
    ) -> None:  # fmt: skip
        """Begin with all of them resident.

        Args:    readers: by name of a layer, in running order, the parameters that it reads.
                 packs: they are packed where that pays; min_bytes: smaller ones stay, as state does.
                 weights_first: a backward reads a parameter again after its gradient was computed.
                 ahead: number of turns that are brought ahead; stays: of the last ones of a forward that do
                 not leave before the backward reads them, unless another forward comes first.
                 prefetches: there is room for any; else each comes when the one before has left."""
        self._weights_first, self._ahead, self._stays = weights_first, ahead * prefetches, stays * prefetches
        self._most_resident = RESIDENT_LAYERS if prefetches else 1
        self.frames, self._min_bytes = TensorStore(store, packs=packs), min_bytes
        self._all: dict[int, EvictableParameter] = {}
        self._by_layer: dict[str, list[EvictableParameter]] = {}
        self.turns: list[list[Parameter]] = []
        for name, read in readers.items():
            able = [p for p in read if id(p) in self._all or may_leave(p.data, min_bytes=min_bytes)]
            if first := [p for p in able if id(p) not in self._all]:
                self._all |= {id(p): EvictableParameter(self.frames, p, len(self.turns)) for p in first}
                self.turns.append(first)
            self._by_layer[name] = [self._all[id(p)] for p in able]
        self.memories = self._all.values()
        self._resident = dict.fromkeys(self.memories)
        self._storages = {one.storage: one for one in self._resident}
        self._recent: list[int] = []  # turns, in a backward
        self._walks = False  # a forward runs
        self._soon: list[EvictableParameter] = []  # brought ahead
        self._optimizer: Optimizer | None = None
        self.versions: list[OffloadedVersion] = []
        # Where gradients of this backward lie, by the identity of their storage.
        self._gradients: dict[int, list[tuple[StorageWeakRef, int, int, EvictableParameter]]] = {}
        self.peak_bytes = 0  # the most of ``resident_bytes`` in this step

    @property
    def resident_bytes(self) -> int:
        """Bytes of resident and prefetched parameters, gradients, and what an optimizer keeps of them."""
        resident = sum(one.resident_bytes(self._kept(one.parameter)) for one in self._resident)
        return resident + sum(one.prefetched_bytes for one in self._soon)

    @property
    def kept_bytes(self) -> int:
        """Bytes of the store's frames that are on the device of the parameters."""
        store = self.frames.store
        devices = {one.parameter.device for one in self.memories}
        return 0 if all(map(store.offloads_from, devices)) else store.num_bytes

    def bind(self, optimizer: Optimizer) -> None:
        """Tell of the optimizer of these parameters, whose state of them leaves with them."""
        self._optimizer = optimizer

    def begin(self) -> None:
        """A step begins: of the one before stay the gradients that no optimizer takes away."""
        self.peak_bytes = self.resident_bytes
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        taken = {id(parameter) for group in groups for parameter in group["params"]}
        for one in self.memories:
            if id(one.parameter) in taken:
                one.forget_gradient()
            if one.parameter.requires_grad:
                first, last = functools.partial(self._arrives, one), functools.partial(self._added, one)
                one.hook(first=first, last=last)

    def layer_done(self, done: Layer | None, following: Layer | None) -> None:
        """Between two layers of a forward: what ``done`` read leaves, what ``following`` reads comes."""
        wanted = [] if following is None else self._by_layer.get(following.name, [])
        if done is None:
            self.settle()
        else:
            last = len(self.turns) - self._stays * torch.is_grad_enabled()
            for one in self._by_layer.get(done.name, ()):
                if one not in wanted and one.turn < last:
                    self._evict(one)
        self._note()
        self._walks = following is not None
        for one in wanted:
            self._load(one)
        if wanted:
            self._note()
            self.prefetch(max(one.turn for one in wanted) + 1)

    def prefetch(self, turn: int, *, step: int = 1, whole: bool = True) -> None:
        """Begin to bring the parameters of the next turns, with ``step`` -1 in a backward their gradients, if
        ``whole`` also those in several pieces; let go of others that were brought ahead."""
        turns = [n for n in range(turn, turn + step * self._ahead, step) if 0 <= n < len(self.turns)]
        wanted, before = [one for n in turns for one in self._of(self.turns[n])], self._soon
        self._soon = [one for one in wanted if whole or len(one.memory.places) == 1]
        for one in before:
            if one not in self._soon:
                one.forget_prefetched()
        for one in self._soon:
            one.fetch(gradient=not self._walks)

    def settle(self) -> None:
        """All of them leave: between two walks, and where one failed."""
        for one in list(self._resident):
            self._evict(one)
        self.prefetch(len(self.turns))  # nothing
        self._note()
        self._recent.clear()
        self._gradients.clear()
        self._walks = False

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is one of the parameters that are resident, or a part of one."""
        return memory_id(tensor) in self._storages

    def saved(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return what autograd keeps for ``tensor``, which ``holds``: the call that gives it back."""
        one = self._storages[memory_id(tensor)]
        begins = tensor.data_ptr() - one.parameter.data_ptr()
        view = None if tensor is one.parameter else view_of(tensor)._replace(start=begins)
        version = version_of(one.parameter)  # a view may count for itself
        return functools.partial(self._read, one, view, version)

    def _read(self, one: EvictableParameter, view: TensorView | None, version: int) -> Tensor:
        refuse_written(version, version_of(one.parameter))
        self._ensure_resident(one)
        return one.parameter.detach() if view is None else view.over(bytes_around(0, one.parameter.data))

    def _ensure_resident(self, one: EvictableParameter) -> None:
        """Bring what a backward reads; what was resident longest leaves."""
        is_next = not self._walks and one.turn not in self._recent
        if one.is_resident and not is_next:
            return
        if is_next and len(self._recent) == self._most_resident:
            last = self._recent.pop(0)
            for other in [other for other in self._resident if other.turn == last]:
                self._evict(other)
        self._load(one)
        if is_next:
            self._recent.append(one.turn)
            self.prefetch(one.turn - 1, step=-1)

    def _arrives(self, one: EvictableParameter, gradient: Tensor) -> None:
        self._ensure_resident(one)
        if not one.adds_in_store:
            one.bring_gradient()

    def _added(self, one: EvictableParameter, _: Tensor) -> None:
        self._note()
        self._refuse_shared_gradient(one)
        one.push_gradient()
        if not self._walks and not self._weights_first:
            self._evict(one)
        self._note()

    def _refuse_shared_gradient(self, one: EvictableParameter) -> None:
        # as of two views that are added up: every later backward adds to both what is meant for each
        gradient = one.parameter.grad
        if gradient is None or not is_elements(gradient):
            return
        storage = gradient.untyped_storage()
        known = self._gradients.setdefault(memory_id(storage), [])
        first, stop = gradient.data_ptr(), gradient.data_ptr() + gradient.nbytes
        for reference, start, end, other in known:
            if other is not one and not reference.expired() and first < end and start < stop:
                raise StageError(
                    "offloaded parameters have separate gradients, and autograd gave one tensor to two, of "
                    f"shapes {tuple(other.memory.like.shape)} and {tuple(gradient.shape)}; read a "
                    "copy of one in forward (clone), or leave parameters on the device"
                )
        known.append((StorageWeakRef(storage), first, stop, one))

    @contextlib.contextmanager
    def gradients(self, turn: Turn, *, written: bool) -> Iterator[dict[int, Tensor]]:
        """The block in which the gradients of ``turn`` are resident, by the identity of their parameters."""
        waiting = self.waiting_gradients(turn)
        gradients = [one.get() if isinstance(one, EvictableTensor) else one for one in waiting]
        yield {id(p): gradient for p, gradient in zip(turn, gradients, strict=True) if gradient is not None}
        for one, gradient in zip(self._of(turn), gradients, strict=True):
            one.looked_at(gradient, written=written)

    def take_gradients(self, turn: Turn) -> list[EvictableTensor | Tensor | None]:
        """Hand over the gradients of ``turn``, which wait where they are; the parameters have none then."""
        gradients = self.waiting_gradients(turn)
        for one in self._of(turn):
            one.give_gradient(None)
        return gradients

    def waiting_gradients(self, turn: Turn) -> list[EvictableTensor | Tensor | None]:
        """Return the gradients of ``turn``, which wait where they are and stay there."""
        return [one.gradient for one in self._of(turn)]

    def give_gradients(self, turn: Turn, gradients: Sequence[EvictableTensor | Tensor | None]) -> None:
        """Have these be the gradients of ``turn``, and wait in the store; they had none."""
        for one, gradient in zip(self._of(turn), gradients, strict=True):
            if gradient is not None:
                one.give_gradient(gradient)
        self._note()

    def is_kept(self, one: EvictableParameter, memory: EvictableTensor) -> bool:
        """Return whether a version has values of a parameter in ``memory``."""
        return any(version.memories[one] is memory for version in self.versions)

    def evict_all(self) -> None:
        """All of them leave; raises StageError where the store has no room for one."""
        self.settle()
        if self._resident:
            raise StageError(
                "every version of offloaded parameters waits in the store, found no room for one; raise its "
                "budget, or leave parameters on the device"
            )

    def uncounted(self) -> None:
        """Forget the counts of writes since they left."""
        for one in self.memories:
            one.version = version_of(one.parameter)

    @contextlib.contextmanager
    def values(self, turn: Turn, *, fresh: Collection[int] = ()) -> Iterator[None]:
        """The block in which the values of ``turn`` are resident; ``fresh`` ones are written before all
        reads."""
        for one in self._of(turn):
            self._load(one, fresh=id(one.parameter) in fresh)
        yield
        self._note()
        for one in self._of(turn):
            self._evict(one)

    def pieces(self, parameter: Parameter, *, written: bool) -> Iterator[Parameter] | None:
        """Return the pieces of ``parameter`` for an update of each by itself; None: it comes as a whole."""
        one, optimizer = self._all[id(parameter)], self._optimizer
        if optimizer is None or not one.comes_in_pieces(self._kept(parameter)):
            return None
        return self._counted(one, one.pieces(optimizer.state, written=written))

    def _counted(self, one: EvictableParameter, pieces: Iterator[Parameter]) -> Iterator[Parameter]:
        for piece in pieces:
            yield piece
            beside = (piece.data, piece.grad, *self._kept(piece).values())
            self._note(sum(t.nbytes for t in beside if isinstance(t, Tensor)))
            del beside
        one.push(self._kept(one.parameter), min_bytes=self._min_bytes)  # what was resident till now
        self._note()

    @property
    def hooks(self) -> set[int]:
        """Numbers of the hooks that see a gradient of these parameters behind a backward."""
        return {one.hooks[1].id for one in self.memories if one.hooks}

    @contextlib.contextmanager
    def whole(self, turn: Turn) -> Iterator[None]:
        """The block in which ``turn`` is resident as it would be without a mirror, to be written."""
        self._pull(self._of(turn))
        yield
        self._note()
        self._push(self._of(turn))

    def pull_all(self) -> None:
        """All parameters come, with their gradients and the state of the optimizer."""
        self._pull(self.memories)
        self._note()

    def push_all(self) -> None:
        """All of them leave as they are now."""
        self._note()  # stores ask what is resident while they take
        self._push(self.memories)

    def close(self) -> None:
        """The model keeps the parameters that it has: after ``pull_all`` all of them."""
        self.frames.ahead.close()
        for one in self.memories:
            for hook in one.hooks:
                hook.remove()
            one.hooks = ()

    def _pull(self, parameters: Iterable[EvictableParameter]) -> None:
        for one in parameters:
            if is_shared := self.is_kept(one, one.memory):
                self._evict(one)
            self._load(one, copies=is_shared)
            one.pull(self._kept(one.parameter), is_shared=is_shared)

    def _push(self, parameters: Iterable[EvictableParameter]) -> None:
        for one in parameters:
            one.push(self._kept(one.parameter), min_bytes=self._min_bytes)
            self._evict(one)
        self._note()

    def _of(self, turn: Turn) -> list[EvictableParameter]:
        return [self._all[id(parameter)] for parameter in turn]

    def _load(self, one: EvictableParameter, *, copies: bool = False, fresh: bool = False) -> None:
        if not one.is_resident:
            one.load(copies=copies, fresh=fresh)
            self._resident[one], self._storages[one.storage] = None, one

    def _evict(self, one: EvictableParameter) -> None:
        if one.is_resident and one.evict():
            del self._resident[one], self._storages[one.storage]

    def _kept(self, parameter: Parameter) -> Kept:
        return {} if self._optimizer is None else self._optimizer.state.get(parameter, {})

    def _note(self, beside: int = 0) -> None:
        num_bytes, counted = self.resident_bytes + beside, self.frames.resident
        counted.add(num_bytes - counted.now)
        self.peak_bytes = max(self.peak_bytes, num_bytes)
