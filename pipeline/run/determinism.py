"""Settings of torch under which a GPU repeats its bits, and a record of them for the run folder.

A GPU needs more than deterministic algorithms: cuBLAS a fixed workspace, before it is first used; cuDNN no
search for the fastest kernel, which may find another one every time."""

import os
from typing import Any

import torch

from ...conf.schema import PlanConfig
from ...stages.device import Device, device_named
from ..distributed.launcher import local_rank

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def begin(config: PlanConfig) -> None:
    """Set this process before anything runs on a device; raises ConfigError: it is not there."""
    # The same switch as use_deterministic_algorithms, which also loads the compiler: 1.6 s in every process.
    torch.set_deterministic_debug_mode("error" if config.deterministic else "default")
    # Deterministic mode fills every torch.empty, 19 ms for 32 MB, and no bit depends on it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if config.deterministic:
        os.environ.setdefault(WORKSPACE, ":4096:8")  # its ranks inherit it
    if not place(config).is_gpu:
        return
    backends: Any = torch.backends  # pyright knows less of cudnn than torch
    if config.deterministic:
        backends.cudnn.benchmark = False
    if config.deterministic or config.tf32:
        for part in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn):
            part.fp32_precision = "tf32" if config.tf32 else "ieee"


def place(config: PlanConfig, *, rank: int | None = None) -> Device:
    """Return where this rank computes, where the plan names nothing else; raises ConfigError: it is missing.

    Args:   rank: its number, where it is a thread; None: as the environment says.
    """
    number, local = (int(os.environ.get("RANK", 0)), local_rank()) if rank is None else (rank, rank)
    return device_named(config.devices[number if isinstance(config.device, list) else 0], local_rank=local)


def held(config: PlanConfig) -> dict[str, str]:
    """Return the settings that decide the bits of a run beside its versions, as they are now."""
    device, backends = place(config), torch.backends
    algorithms = str(torch.are_deterministic_algorithms_enabled())
    found = {"device": str(device.torch), "deterministic_algorithms": algorithms}
    if device.is_gpu:
        found |= {
            "cublas_workspace": os.environ.get(WORKSPACE, ""),
            "cuda": str(torch.version.cuda),
            "cudnn": str(backends.cudnn.version()),
            "cudnn_benchmark": str(backends.cudnn.benchmark),
            "float32_of_matrix_products": backends.cuda.matmul.fp32_precision,
            "float32_of_convolutions": backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        }
    return found
