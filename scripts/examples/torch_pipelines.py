"""torch's own 1F1B, plain, with packed transfers and with packed saved tensors, compared bit for bit.

torchrun --nproc-per-node 2 scripts/examples/torch_pipelines.py
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import penstock


def train(packed: str = "nothing") -> tuple[list[Tensor], Any]:
    """Return the gradients of this rank's stage after one step, and what counts the packed bytes."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU())
    last = nn.Sequential(nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 14 * 14, 10))
    images, labels = torch.randn(16, 3, 16, 16), torch.randint(10, (16,))
    module = (first, last)[dist.get_rank()]
    stage, counts = PipelineStage(module, dist.get_rank(), 2, torch.device("cpu")), None
    if packed == "saved tensors":
        counts = penstock.offload_stage(stage, "packed", min_bytes="4KiB")
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.functional.cross_entropy)
    if packed == "transfers":
        counts = penstock.pack_transfers(schedule, "zero_value")
    if dist.get_rank() == 0:
        schedule.step(images)
    else:
        schedule.step(target=labels)
    print(f"rank {dist.get_rank()}: {packed} packed{f', {counts}' if counts else ''}")
    return [p.grad.view(torch.int32) for p in module.parameters() if p.grad is not None], counts


def main() -> None:
    """Train in each way."""
    dist.init_process_group("gloo")
    torch.use_deterministic_algorithms(True)
    plain, *others = (train(packed)[0] for packed in ("nothing", "transfers", "saved tensors"))
    same = all(torch.equal(a, b) for other in others for a, b in zip(plain, other, strict=True))
    print(f"rank {dist.get_rank()}: {'all gradients have the same bits' if same else 'gradients differ'}")
    dist.destroy_process_group()
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
