"""A device that is the CPU and notes what is asked of it: what a GPU would be asked, without one."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.stages.device import Device


class Noting(Device):
    """``asked`` has the names of what was asked, in order; its marks are 1, 2, 4, 8, ... seconds.

    Random layers may draw from ``own``, too, as from the generator of a GPU."""

    def __init__(self, device: torch.device | None = None, *, is_gpu: bool = False) -> None:
        super().__init__(device or torch.device("cpu"))
        self.is_gpu = is_gpu
        self.asked: list[str] = []
        self.own = torch.Generator().manual_seed(5)
        self.kept: list[torch.Tensor] = []
        self.mark = 0.5

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        return torch.default_generator, self.own

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.asked.append(f"pinned {num_bytes}")
        self.kept.append(super().pinned(num_bytes))
        return self.kept[-1]

    def now(self) -> float:
        self.asked.append("now")
        self.mark *= 2
        return self.mark

    def seconds(self, begin: float, end: float) -> float:
        self.asked.append("seconds")
        return end - begin

    def synchronize(self) -> None:
        self.asked.append("synchronize")

    @property
    def peak_bytes(self) -> int:
        return 7000

    def reset_peak(self) -> None:
        self.asked.append("reset_peak")


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for a GPU: a number that Python reads of a tensor."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ == "_local_scalar_dense"
        return func(*args, **(kwargs or {}))
