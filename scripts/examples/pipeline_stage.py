"""torch's own pipeline with packed saved tensors: ``penstock.offload_stage``.

    torchrun --nproc-per-node 2 scripts/examples/pipeline_stage.py

Runs a small network on two ranks by ``torch.distributed.pipelining``, once as it is and once with
the saved tensors of every micro-batch packed until its backward, and compares all gradients bit for bit.
"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import penstock
from penstock.stages.memory.offload import Offload

MICRO_BATCHES = 4


def network() -> list[nn.Module]:
    """The two stages of the network."""
    first = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()]
    second = [nn.MaxPool2d(2), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10)]
    return [nn.Sequential(*first), nn.Sequential(*second)]


def gradients(
    module: nn.Module, images: torch.Tensor, labels: torch.Tensor, *, packs: bool
) -> tuple[list[torch.Tensor], Offload | None]:
    """One step of 1F1B: the gradients of this rank's stage, and what was saved, if it is packed."""
    rank = dist.get_rank()
    stage = PipelineStage(module, rank, dist.get_world_size(), torch.device("cpu"))
    saved = penstock.offload_stage(stage, "packed", min_bytes="4KiB") if packs else None
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.cross_entropy)
    if rank == 0:
        schedule.step(images)
    else:
        schedule.step(target=labels, losses=[])
    return [p.grad for p in module.parameters() if p.grad is not None], saved


def compare() -> Offload:
    """Both ways, one after the other; raises if one bit differs, returns what counted the saved bytes."""
    torch.manual_seed(0)
    module = network()[dist.get_rank()]
    images, labels = torch.randn(16, 3, 16, 16), torch.randint(10, (16,))
    plain, _ = gradients(copy.deepcopy(module), images, labels, packs=False)
    packed, saved = gradients(module, images, labels, packs=True)
    assert saved is not None, "it was asked for"
    for a, b in zip(plain, packed, strict=True):
        if not torch.equal(a.view(torch.int32), b.view(torch.int32)):
            raise SystemExit(f"rank {dist.get_rank()}: the gradients differ")
    return saved


def main() -> None:
    """Join torchrun's group, compare, say what was saved."""
    dist.init_process_group("gloo")
    saved = compare()
    ratio = f"{saved.bytes_raw / saved.bytes_kept:.2f}x"
    saved_bytes = f"{saved.bytes_raw} bytes saved, {saved.bytes_kept} kept ({ratio})"
    print(f"rank {dist.get_rank()}: {saved_bytes}, all gradients the same bits")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
