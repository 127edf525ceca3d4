"""Guards: what a person's code reaches of the model in a step, besides the layers.

The loss, hooks of weights and of optimizers, schedulers and backward functions may look anywhere: at memory
that is offloaded or belongs to another rank, at a buffer that forwards of later micro-batches have written to
by then. In a watched step every operation of torch that such code calls is looked at. It finds what the plain
loop shows it at that moment, or the step is refused in a sentence that says who reads or writes what.

    the loss        may read what is in memory here, but no buffer of an earlier stage that forwards write to
    a backward      may read parameters of its stage and unwritten buffers; draws and writes nothing,
                    and hooks of the weights of one stage count nothing that hooks of another do
    an update       (optimizers, their hooks, schedulers) may read and write what is of its stage

Watched are the first step with every shape of a micro-batch, the first after a load, and every hundredth.
"""

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...compression.errors import StageError
from ...stages import memory
from ...stages.meta_watch import tensors_in, written_by
from ...stages.seeds import TURN, generators_of, python_states, states_of
from ...stages.stage import recompute
from ...stages.torch_private import TorchDispatchMode, memory_id
from ...stages.tracing.object_snapshot import OWN_STATE, Facts, change, contents, is_foreign, walk
from ..schedules.instruction import Instruction, Op
from .step_planner import Step

EVERY = 100  # one step of so many is watched, beside the first of its kind

Run = Callable[[Step, Instruction], None]
DOORS = dict.fromkeys((Op.B, Op.I, Op.W), "a backward") | {Op.U: "an update"}
_ENGINE = f"{__package__}.engine"  # opens the doors
_AGAIN = memory.__name__, recompute.__name__
_NOT_A_PERSON = {"penstock", "torch", *sys.stdlib_module_names}
_NUMBERS = (int, float, complex, Tensor, *OWN_STATE)
_BUFFER_REMEDY = "return it from forward"


class Guards:
    """The watch over one pipeline in this process.

    Args:
        model: Its modules are held weakly.
        homes: For every parameter and buffer by name the stages that read it.
        written: Buffers and frozen parameters that a forward in train mode writes to.
        replicated: Whether replicas share the micro-batches, so that no process sees all losses.
        moves: Whether parameters are offloaded, so that their memory changes in a step."""

    def __init__(
        self, model: nn.Module, *, homes: Mapping[str, Collection[int]], written: Collection[str],
        here: Collection[int], replicated: bool, moves: bool,
    ) -> None:  # fmt: skip
        paths = ((name, *name.rpartition(".")[::2]) for name in homes)
        self._places = [(name, weakref.ref(model.get_submodule(p)), item) for name, p, item in paths]
        self.homes, self.written, self.here = homes, written, here
        self.replicated, self.moves = replicated, moves
        self._kinds: set[Any] = set()  # shapes of the micro-batches that watched steps had
        self._new: set[Any] = set()
        self._watches = False

    def loaded(self) -> None:
        """Watch the next step of every kind again."""
        self._kinds.clear()

    def watched(self, step: Step, run: Mapping[Op, Run]) -> Mapping[Op, Run]:
        """Return what runs each instruction of ``step``: ``run`` itself, unless the step is watched."""
        inputs = (batch.inputs for batch in step.micro_batches.values())
        shapes = {tuple((x.shape, x.dtype) for x in some) for some in inputs}
        self._new = (shapes or {()}) - self._kinds  # a replica without a share updates, too
        self._watches = bool(self._new) or step.number % EVERY == 0
        return {op: functools.partial(self._run, call) for op, call in run.items()} if self._watches else run

    def _run(self, call: Run, step: Step, instruction: Instruction) -> None:
        door = DOORS.get(instruction.op)
        with self._at(door, instruction.stage) if door else contextlib.nullcontext():
            call(step, instruction)

    def ran(self) -> None:
        """The step has run to its end."""
        self._kinds |= self._new

    def loss(self, stage: int, loss: object) -> contextlib.AbstractContextManager[object]:
        """The block in which ``loss`` is computed, after the forward of the last ``stage``."""
        return self._at("the loss", stage, loss) if self._watches else contextlib.nullcontext()

    @contextlib.contextmanager
    def _at(self, door: str, stage: int, loss: object = None) -> Iterator[None]:
        draws = door == "a backward" or (door == "the loss" and self.replicated)
        found = ((name, getattr(module(), item, None)) for name, module, item in self._places)
        named = {name: tensor for name, tensor in found if isinstance(tensor, Tensor)}
        before = _random_states(named.values()) if draws else ()
        counted = self._counted(door, stage, named, loss)
        with _Watch(self, door, stage, named) as watch:
            yield
        shared = door == "the loss" or self.replicated
        why = "replicas do so apart" if shared else "the schedule decides the order of backwards"
        if draws and before != _random_states(named.values()):
            where = f" ({watch.drew})" if watch.drew else ""
            raise StageError(f"{door} draws random numbers{where}, and {why}; draw them in forward")
        for path, now in self._counted(door, stage, named, loss).items() if counted else ():
            was = counted.get(path, now)
            if was != now and (not issubclass(now[0], Tensor) or was[1] == now[1]):
                count = f"{path} ({change(was, now)})"
                raise StageError(f"{door} counts in {count}, and {why}; count ahead of each step")

    def _counted(self, door: str, stage: int, named: Mapping[str, Tensor], loss: object) -> Facts:
        """The numbers that ``door`` of ``stage`` keeps together with other stages or replicas."""
        found: Facts = {}
        if door == "the loss" and self.replicated:
            found = contents(_reach(loss), name="loss", enters=_is_a_persons)
        elif door == "a backward":
            others = (name for name, homes in self.homes.items() if self.replicated or set(homes) != {stage})
            reached = {name: [*map(_reach, _hooks(named[name]))] for name in others if name in named}
            hooks = {name: each for name, each in reached.items() if each}
            found = contents(hooks, name="hooks", enters=_is_a_persons)
        return {path: fact for path, fact in found.items() if issubclass(fact[0], _NUMBERS)}

    def refusal(self, door: str, stage: int, name: str, tensor: Tensor, *, writes: bool) -> str:
        """The reason why ``door`` of ``stage`` must not read or write ``name``; "" where the plain loop has
        the same."""
        homes, parameter = self.homes[name], isinstance(tensor, nn.Parameter) and name not in self.written
        ours = set(homes) == {stage}
        if writes and not (door == "an update" and ours):
            return "and others read it in the same step; write to it between steps"
        if parameter and not tensor.untyped_storage().nbytes():
            return "which is offloaded; plan with parameters_tier=device"
        if not any(home in self.here for home in homes) and (parameter or name in self.written):
            return f"which another rank trains; {_BUFFER_REMEDY}, or read it between steps"
        if parameter:
            if door != "the loss" and not ours and tensor.requires_grad:
                return f"which is of stage {min(homes)}, updated at another time; read it between steps"
        elif name in self.written and (door == "a backward" or (door == "the loss" and not ours)):
            return f"to which forwards of later micro-batches have written by then; {_BUFFER_REMEDY}"
        return ""


class _Watch(TorchDispatchMode):
    """Checks every operation while a door is open."""

    def __init__(self, guards: Guards, door: str, stage: int, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.guards, self.door, self.stage, self.drew = guards, door, stage, ""
        self.tensors, self.names = named, {id(tensor): name for name, tensor in named.items()}
        self.storages = self._storages()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code of torch.compile run as it does without a watch."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (code := self._code()) is not None:
            if torch.Tag.nondeterministic_seeded in func.tags:
                self.drew = code
            self._check(code, tensors_in((args, kwargs)), written_by(func, args, kwargs))
        return func(*args, **kwargs)

    def _check(self, code: str, touched: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Refuse those of these tensors that are of the model, if the plain loop might have others there."""
        if self.guards.moves:
            self.storages = self._storages()
        for tensor in touched:
            if (name := self._name(tensor)) is None:
                continue
            writes = any(tensor is one for one in written)
            why = self.guards.refusal(self.door, self.stage, name, self.tensors[name], writes=writes)
            if why:
                verb, where = "writes to" if writes else "reads", f" ({code})" if code else ""
                raise StageError(f"{self.door} {verb} {name} of the model{where}, {why}")

    def _storages(self) -> dict[int, str]:
        strided = ((name, t) for name, t in self.tensors.items() if t.layout is torch.strided)
        return {memory_id(tensor): name for name, tensor in strided}

    def _name(self, tensor: Tensor) -> str | None:
        if (name := self.names.get(id(tensor))) is None and tensor.layout is torch.strided:
            name = self.storages.get(memory_id(tensor))
        return name

    def _code(self) -> str | None:
        """Name and place of the person's code that is running; None: only torch's and ours."""
        frame: FrameType | None = sys._getframe(2)
        code = "" if self.door == "the loss" else None
        while frame is not None and (module := frame.f_globals.get("__name__", "")) != _ENGINE:
            if module.startswith(_AGAIN):  # it brings what is read, or runs a forward again
                return None
            if not code and module.partition(".")[0] not in _NOT_A_PERSON:
                code = f"{frame.f_code.co_qualname}, {frame.f_code.co_filename}:{frame.f_lineno}"
            frame = frame.f_back
        return code


def _hooks(parameter: Tensor) -> Iterator[object]:
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        yield from (getattr(parameter, kind, None) or {}).values()


def _reach(call: Any) -> tuple[object, ...]:
    """A callable, and the globals that the functions of a person name to which it leads."""
    led_to = (item for _, item, _ in walk(call, enters=_is_a_persons))
    found = (item for item in led_to if isinstance(item, FunctionType) and not is_foreign(item))
    return call, {n: f.__globals__[n] for f in found for n in f.__code__.co_names if n in f.__globals__}


def _is_a_persons(item: object) -> bool:
    """True for an object that is not ours; offloaded parameters have hooks, too."""
    home = item if isinstance(item, FunctionType) else type(item)
    return not home.__module__.startswith("penstock.")


def _random_states(tensors: Iterable[Tensor]) -> tuple[object, ...]:
    """The states of torch's generators where ``tensors`` are, of Python's, and of NumPy's."""
    with TURN:
        return *(state.numpy().tobytes() for state in states_of(generators_of(tensors))), *python_states()
