"""torch's own 1F1B with packed transfers, compared bit for bit with the plain run.

torchrun --nproc-per-node 2 scripts/examples/pack_transfers.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import penstock


def train(*, packed: bool) -> list[Tensor]:
    """Return the gradients of this rank's stage after one step."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU())
    last = nn.Sequential(nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 14 * 14, 10))
    images, labels = torch.randn(16, 3, 16, 16), torch.randint(10, (16,))
    module = (first, last)[dist.get_rank()]
    stage = PipelineStage(module, dist.get_rank(), 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.cross_entropy)
    transfers = penstock.pack_transfers(schedule, "zero_value") if packed else None
    if dist.get_rank() == 0:
        schedule.step(images)
    else:
        schedule.step(target=labels)
    print(f"rank {dist.get_rank()}: {transfers or 'as torch sends'}")
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def main() -> None:
    """Train both ways."""
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    same = all(map(torch.equal, train(packed=False), train(packed=True)))
    print(f"rank {dist.get_rank()}: {'all gradients have the same bits' if same else 'gradients differ'}")
    dist.destroy_process_group()
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
