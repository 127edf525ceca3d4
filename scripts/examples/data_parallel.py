"""DistributedDataParallel, or FSDP2, whose gradients (and shards) travel packed.

torchrun --nproc-per-node 2 scripts/examples/data_parallel.py ddp   # or fsdp2
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock


def main(host: str = "ddp") -> None:
    """Train each rank on its own batches."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    if host == "ddp":
        packed = [penstock.ddp_hook("exponent")]  # "auto" sends them as they are where the link is fast
        model = DistributedDataParallel(model)
        model.register_comm_hook(model.process_group, packed[0])
    else:
        packed = [penstock.FsdpAllGather("exponent"), penstock.FsdpReduceScatter("exponent")]
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        model.set_custom_all_gather(packed[0])
        model.set_custom_reduce_scatter(packed[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randn(32, 256)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {dist.get_rank()}:", *(one.transfers for one in packed))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:2])
