"""Frames of a device between ranks whose payloads take another way than their headers."""

import dataclasses
from datetime import timedelta
from typing import cast

import pytest
import torch.distributed as dist
from cases import Case, on_ranks, parameters
from law import rank_differences
from torch.distributed import ProcessGroup

from penstock.pipeline.ranks import nccl
from penstock.pipeline.ranks.staged import Direct

DIRECT = [
    Case(model="mlp", cuts=3, micro_batches=5),
    Case(model="mlp", cuts=4, ranks=2, schedule="interleaved", micro_batches=5, codec="raw"),
    Case(model="PoolOfRelu", cuts=["relu"], micro_batches=5),
    Case(model="gated", cuts=3, schedule="zb_h1", micro_batches=7, extra_in_flight=1, codec="auto", steps=4),
    Case(model="gpt_tied", cuts=4, ranks=2, schedule="zbv", micro_batches=5, steps=2),
    Case(model="tied", cuts=("random", 4, 1), schedule="gpipe"),
]


def directly(case, path, random_layers):
    """With payloads over groups of their own, as over NCCL, between all ranks."""
    ranks = range(dist.get_world_size())
    limit = timedelta(seconds=30)
    down, up = (cast(ProcessGroup, dist.new_group(list(ranks), limit, "gloo")) for _ in range(2))
    mine = dist.get_rank()
    direct = {rank: Direct(rank, down, up) for rank in ranks if rank > mine}
    direct |= {rank: Direct(rank, up, down) for rank in ranks if rank < mine}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nccl, "direct_routes", lambda *args, **kwargs: direct)
        return rank_differences(case, path, random_layers)


@pytest.mark.ranks
@pytest.mark.parametrize("case", parameters(DIRECT))
def test_payloads_from_device_to_device_have_the_bits_of_the_plain_loop(case, ranks, tmp_path):
    late = dataclasses.replace(case, late=tuple(range(4)))
    assert on_ranks(ranks, directly, late, tmp_path) == []
