"""The device of a rank: the one place that names a kind of device and asks torch what goes with it.

Computing is queued on a GPU, so packing and copies are work on other streams, handed over by what says when
it is done. On a CPU everything is done where it is asked for, by the same methods.
"""
# ruff: noqa: D102 (methods of a GPU are those of Device)

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from ..compression.errors import ConfigError, PlanError
from ..compression.names import AUTO, GPU, HOST, is_device
from .worker import Stream, Work

CPU = torch.device(HOST)
KINDS = (HOST, GPU)  # of device whose tensors we pack
T = TypeVar("T")


def is_gpu(device: torch.device) -> bool:
    """Return whether work on ``device`` is queued, and its memory is not the host's."""
    return device.type == GPU


class Device:
    """Device of a rank: the CPU, or by the same methods a GPU; ``torch`` is what tensors are moved to."""

    is_gpu = False

    def __init__(self, device: torch.device = CPU) -> None:
        self.torch = device

    def __repr__(self) -> str:
        return f"<Device {self.torch}>"

    @property
    def identity(self) -> str | None:
        """Identity of the GPU among all machines; None: it is none."""
        return None

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """Generators that random layers draw from here."""
        return (torch.default_generator,)

    @property
    def kernels(self) -> Any:
        """Kernels that pack and unpack there without a wait: a module like ``gpu/frames.py``."""
        raise NotImplementedError("what lies in host memory is packed where it is")

    def stream(self) -> Stream:
        """Return a new stream beside the computing."""
        return Stream()

    def reached(self) -> Work[None]:
        """Return the point that the computing has reached: what was computed is there behind it."""
        return Work(None)

    def wait_for(self, work: Work[Any]) -> None:
        """Let the computing wait for ``work``; this thread goes on."""

    def use(self, tensor: Tensor) -> None:
        """Say that the computing uses ``tensor``, which a stream has made: its memory stays that long."""

    def pinned(self, num_bytes: int) -> Tensor:
        """New host memory, 1-D uint8, that the device copies from and to without help."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def now(self) -> Any:
        """A mark in the course of the computing."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two marks that the computing has passed."""
        return end - begin

    def synchronize(self) -> None:
        """Let this thread wait until all that was queued is done."""

    def current(self) -> contextlib.AbstractContextManager[Any]:
        """The block in which this is the device that torch means where none is named."""
        return contextlib.nullcontext()

    def reset_peak(self) -> None:
        """Begin to look for the most memory anew."""

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes of tensors at a time since; None: the device does not count them."""
        return None


class _CudaWork(Work[T]):
    def __init__(self, value: T, event: torch.cuda.Event) -> None:
        super().__init__(value)
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    @property
    def done(self) -> bool:
        return self.event.query()


class _CudaStream(Stream):
    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(
        self, task: Callable[[], T], *, after: Iterable[Work[Any]] = (), reads: Iterable[Tensor] = ()
    ) -> Work[T]:
        self._wait_for(after)
        for tensor in reads:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            value, event = task(), torch.cuda.Event()
            event.record()
        return _CudaWork(value, event)

    @contextlib.contextmanager
    def run(self, after: Work[Any] | None = None) -> Iterator[None]:
        self._wait_for([after])
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()  # so the caller may free what was read, and read what was made

    def _wait_for(self, works: Iterable[Work[Any] | None]) -> None:
        for work in works:
            if isinstance(work, _CudaWork):
                self._stream.wait_event(work.event)


class CudaDevice(Device):
    """A GPU: kernels and copies are queued on streams, and events say when they are done."""

    is_gpu = True

    @property
    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.torch).uuid)

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """The CPU's and its own: a layer may draw from either."""
        with self.current():
            torch.cuda.init()
        return torch.default_generator, torch.cuda.default_generators[self.torch.index]

    @property
    def kernels(self) -> Any:
        from ..compression.gpu import frames

        return frames

    @property
    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch)

    def stream(self) -> Stream:
        return _CudaStream(self.torch)

    def reached(self) -> Work[None]:
        event = torch.cuda.Event()
        event.record(self._computing)
        return _CudaWork(None, event)

    def wait_for(self, work: Work[Any]) -> None:
        if isinstance(work, _CudaWork):
            self._computing.wait_event(work.event)

    def use(self, tensor: Tensor) -> None:
        tensor.record_stream(self._computing)

    def pinned(self, num_bytes: int) -> Tensor:
        """Page-locked memory; locking is slow, so keep it."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._computing)
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return begin.elapsed_time(end) / 1000

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def current(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.device(self.torch)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch)


@functools.cache
def _known(device: torch.device) -> Device:
    return CudaDevice(device) if is_gpu(device) else Device(device)


def device_of(device: torch.device) -> Device:
    """The one Device of what torch calls so; a GPU without a number is the current one."""
    bare = is_gpu(device) and device.index is None
    return _known(torch.device(GPU, torch.cuda.current_device()) if bare else device)


def memory_on(gpu: torch.device) -> tuple[str, int, int]:
    """Identity of a GPU, alike in all processes; the bytes there that nobody has, and those that we have."""
    which = str(torch.cuda.get_device_properties(gpu).uuid)
    return which, torch.cuda.mem_get_info(gpu)[0], torch.cuda.memory_reserved(gpu)


def autocast(
    dtype: torch.dtype, *, enabled: bool = True, cache: bool = False, device: torch.device = CPU
) -> torch.autocast:
    """Casts as torch.autocast does on ``device``; a ``cache`` of weights depends on what shares a stage."""
    return torch.autocast(device.type, dtype, enabled=enabled, cache_enabled=cache)


def autocast_state(device: torch.device = CPU) -> tuple[bool, torch.dtype]:
    """Return whether autocast is on now, and to which dtype it casts."""
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


def grad_scaler(device: torch.device = CPU) -> GradScaler:
    """A dynamic loss scale for gradients on ``device``."""
    return GradScaler(device.type)


def device_named(name: str, *, local_rank: int = 0) -> Device:
    """Return the device of cpu; cuda (the GPU with the number ``local_rank``, counted around); cuda:N; or
    auto, cuda if there is one. Raises ConfigError if it is not there."""
    if name != AUTO and not is_device(name):
        raise ConfigError(f"device={name} is not known; known are {HOST}, {GPU}, {GPU}:N and {AUTO}")
    count = torch.cuda.device_count() if name != HOST and torch.cuda.is_available() else 0
    if name == HOST or (name == AUTO and not count):
        return device_of(CPU)
    if not count:
        raise ConfigError(
            f"device={name} needs a GPU, and torch {torch.__version__} finds none; take device={HOST}"
        )
    _, _, number = name.partition(":")
    index = int(number) if number else local_rank % count
    if index >= count:
        known = ", ".join(f"{GPU}:{i}" for i in range(count))
        raise ConfigError(f"device={name} is not on this machine, which has {known}; take one of these")
    return device_of(torch.device(GPU, index))


def home_of(model: nn.Module) -> torch.device:
    """Return the device of the parameters of ``model``, or else of its buffers, or else the CPU; PlanError if
    they are on several devices, or on one where no rank computes."""
    tensors = [*model.parameters()] or [*model.buffers()]
    found = {tensor.device: None for tensor in tensors if not tensor.is_meta}
    if len(found) > 1:
        places = ", ".join(map(str, found))
        raise PlanError(
            f"a model is on one device, and the stages are spread from there, found {places}; move it: "
            f"model.to({str(next(iter(found)))!r})"
        )
    home = next(iter(found), CPU)
    if home.type not in KINDS:
        raise PlanError(
            f"a rank computes on one of {', '.join(KINDS)}, found a model on {home}; move it: model.to('cpu')"
        )
    return home
