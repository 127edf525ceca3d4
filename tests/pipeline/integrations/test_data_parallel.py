"""Gradients of DistributedDataParallel and shards of FSDP2 as frames: sums in the order of ranks."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import same_bits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import penstock
from penstock import PlanError
from penstock.pipeline.integrations import exchange

WHOLE, TINY = exchange.SLICE_BYTES, 1000  # bytes: more than any tensor here has, and less


@contextlib.contextmanager
def sliced(num_bytes):
    """The block in which tensors travel in slices of so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "SLICE_BYTES", num_bytes)
        yield


def model(dtype=torch.float32, width=37):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(width, 10)).to(dtype)


def batch(step, rank, dtype=torch.float32, width=37):
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(8, width, generator=draw).to(dtype), torch.randint(10, (8,), generator=draw)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def in_order(steps, dtype, width=37, make=momentum, *, divides_first=False):
    """Parameters after steps whose gradients are the mean over the ranks, added in their order."""
    replica, size = model(dtype, width), dist.get_world_size()
    optimizer = make(replica.parameters())
    for step in range(steps):
        of_ranks = []
        for rank in range(size):
            x, y = batch(step, rank, dtype, width)
            optimizer.zero_grad()
            nn.functional.cross_entropy(replica(x), y).backward()
            parts = size if divides_first else 1
            of_ranks.append([p.grad / parts for p in replica.parameters() if p.grad is not None])
        for parameter, gradients in zip(replica.parameters(), zip(*of_ranks, strict=True), strict=True):
            total = gradients[0].clone()
            for gradient in gradients[1:]:
                total += gradient
            parameter.grad = total if divides_first else total / size
        optimizer.step()
    return list(replica.parameters())


def with_ddp(codec, bucket_mb, slice_bytes, dtype):
    hook = penstock.ddp_hook(codec)
    replica = DistributedDataParallel(model(dtype), bucket_cap_mb=bucket_mb)
    replica.register_comm_hook(replica.process_group, hook)
    optimizer = momentum(replica.parameters())
    with sliced(slice_bytes):
        for step in range(3):
            x, y = batch(step, dist.get_rank(), dtype)
            optimizer.zero_grad()
            nn.functional.cross_entropy(replica(x), y).backward()
            optimizer.step()
    expected = in_order(3, dtype, divides_first=True)
    assert all(map(same_bits, replica.parameters(), expected))
    return hook.transfers.bytes_raw, hook.transfers.bytes_sent


@pytest.mark.ranks
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("bucket_mb", "slice_bytes"),
    [(0.004, WHOLE), (25, WHOLE), (25, TINY)],
    ids=["many buckets", "one bucket", "many slices"],
)
@pytest.mark.parametrize(
    ("codec", "dtype"), [("auto", torch.float32), ("exponent", torch.bfloat16)], ids=["auto", "exponent"]
)
def test_gradients_are_added_in_the_order_of_ranks_whatever_the_buckets(
    ranks, size, bucket_mb, slice_bytes, codec, dtype
):
    for raw, sent in ranks.run(with_ddp, codec, bucket_mb, slice_bytes, dtype, ranks=size):
        assert raw > 0
        assert codec == "auto" or slice_bytes == TINY or sent < 0.9 * raw  # a frame has a header


def in_groups_of_half():
    """Gradients of two models with and without the hook: in a group of this rank, and of float16 on all."""
    alone, found = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()], []
    hook = penstock.ddp_hook("raw")
    large = torch.tensor([[40000.0, 3e-7, 1.8e-7], [40000.0, 1.2e-7, 6e-8]])[dist.get_rank()]
    for group, values in ((alone, torch.ones(3) + dist.get_rank()), (None, large.half())):
        for packed in (False, True):
            layer = nn.Linear(1, 3, bias=False, dtype=values.dtype)
            replica = DistributedDataParallel(layer, process_group=group)
            if packed:
                replica.register_comm_hook(replica.process_group, hook)
            (replica(torch.ones(1, 1, dtype=values.dtype)) * values).sum().backward()
            assert layer.weight.grad is not None
            found.append(layer.weight.grad.flatten().tolist())
    return found


@pytest.mark.ranks
def test_the_mean_is_that_of_the_group_and_divides_before_it_adds(ranks):
    for rank, (plain, packed, half, packed_half) in enumerate(ranks.run(in_groups_of_half, ranks=2)):
        assert packed == plain == [1.0 + rank] * 3
        assert packed_half == half


def lossy():
    replica = DistributedDataParallel(model())
    replica.register_comm_hook(None, penstock.ddp_hook("bf16"))
    x, y = batch(0, dist.get_rank())
    nn.functional.cross_entropy(replica(x), y).backward()


def sparse():
    replica = DistributedDataParallel(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)))
    replica.register_comm_hook(None, penstock.ddp_hook())
    replica(torch.tensor([1, 2])).sum().backward()


@pytest.mark.ranks
def test_what_the_hook_refuses_ends_the_backward(ranks):
    for text, _ in ranks.try_run(lossy, ranks=2, deadline=5):
        assert "codec is one that loses nothing, found bf16" in text
    for text, _ in ranks.try_run(sparse, ranks=2, deadline=5):
        assert "ddp_hook packs dense gradients, found sparse ones" in text


def with_fsdp(packed, dtype):
    mesh, whole = init_device_mesh("cpu", (dist.get_world_size(),)), model(width=256)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    gather, scatter = penstock.FsdpAllGather("exponent"), penstock.FsdpReduceScatter("exponent")
    sharded: list[Any] = [*whole, whole]
    for module in sharded:
        fully_shard(module, mesh=mesh, mp_policy=policy)
        if packed:
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
    optimizer = momentum(whole.parameters())
    for step in range(3):
        x, y = batch(step, dist.get_rank(), width=256)
        optimizer.zero_grad()
        nn.functional.cross_entropy(whole(x).float(), y).backward()
        optimizer.step()
    sums: Any = [p.full_tensor() for p in whole.parameters()]  # type: ignore[attr-defined]
    return sums, [(one.bytes_raw, one.bytes_sent) for one in (gather.transfers, scatter.transfers)]


def compare_fsdp(dtype):
    """Two numbers have one sum in either order; three have that of the order of ranks."""
    packed, counted = with_fsdp(packed=True, dtype=dtype)
    with sliced(TINY):
        again, _ = with_fsdp(packed=True, dtype=dtype)
    assert all(map(same_bits, packed, again))
    if dist.get_world_size() == 2:
        plain, _ = with_fsdp(packed=False, dtype=dtype)
        assert all(map(same_bits, packed, plain))
    elif dtype is None:
        assert all(map(same_bits, packed, in_order(3, torch.float32, width=256)))
    return counted


@pytest.mark.ranks
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_fsdp_adds_in_the_order_of_ranks_and_slices_change_no_bit(ranks, size, dtype):
    for counted in ranks.run(compare_fsdp, dtype, ranks=size):
        for raw, sent in counted:
            assert 0 < sent < raw


def test_only_sums_and_means_are_scattered():
    scatter = penstock.FsdpReduceScatter("raw")
    one = torch.zeros(2)
    with pytest.raises(PlanError, match="summed or averaged"):
        scatter(one, one, None, dist.ReduceOp.MAX)  # type: ignore[arg-type]
