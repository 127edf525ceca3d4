"""A world beside other people's groups: pipelines side by side, along a mesh, and what they leave alone."""

import pytest
import torch
import torch.distributed as dist
from cases import Case, pipeline_with_batches, plan_file
from reference import same_bits
from torch.distributed.device_mesh import init_device_mesh

import penstock
from penstock import TransportError
from penstock.pipeline.distributed.process_group import World

CASE = Case(model="mlp", cuts=2)


def foreign(path, rank, ranks):
    """A default group that somebody else has made."""
    store = dist.FileStore(path)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def leave():
    """End that group together."""
    dist.barrier()
    dist.destroy_process_group()


def train(plan_path, world):
    """Losses and weights of a pipeline in this world, which is left; the job's own group goes on."""
    pipe, batches = pipeline_with_batches(CASE, penstock.Plan.load(plan_path), world=world)
    losses = [pipe.step(*batch).loss for batch in batches]
    state = pipe.state_dict()["model"]
    pipe.close()
    ones = torch.ones(1)
    dist.all_reduce(ones)
    rank = world.rank
    world.close()
    return rank, losses, state, int(ones)


def side_by_side(path, plan_path):
    """Two pipelines of two ranks each inside one job of four, along a mesh and then in groups of the job."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    foreign(f"{path}/job", rank, 4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    with pytest.raises(TransportError, match="one dimension of a mesh, found 2; give"):
        World.from_mesh(mesh)
    found = [train(plan_path, World.from_mesh(mesh["pp"]))]
    pairs = [[0, 3], [1, 2]]  # ranks that do not begin at 0 nor lie side by side
    groups = [dist.new_group(pair) for pair in pairs]  # a rank outside of one gets no group
    (mine,) = [group for group in groups if isinstance(group, dist.ProcessGroup)]
    found.append(train(plan_path, World(mine)))
    leave()
    return found


def test_pipelines_run_side_by_side_in_somebody_elses_job(ranks, tmp_path):
    alone, batches = pipeline_with_batches(CASE)
    expected = [alone.step(*batch).loss for batch in batches]
    weights = alone.state_dict()["model"]
    of_ranks = ranks.run(side_by_side, str(tmp_path), plan_file(CASE, tmp_path), ranks=4)
    for found in zip(*of_ranks, strict=True):
        assert sorted(rank for rank, *_ in found) == [0, 0, 1, 1]
        for rank, losses, state, ones in found:
            assert (losses, ones) == (expected, 4)
            assert rank or all(same_bits(state[name], weight) for name, weight in weights.items())


def in_the_default_group(path, plan_path):
    """A pipeline that is told nothing, in a default group of somebody else; whether that one still stands."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    foreign(f"{path}/default", rank, 2)
    pipe, batches = pipeline_with_batches(CASE, penstock.Plan.load(plan_path))
    loss = pipe.step(*batches[0]).loss
    pipe.close()
    leave()
    return loss, pipe.world.group is None


def test_a_default_group_of_somebody_else_is_used_and_left_alone(ranks, tmp_path):
    alone, batches = pipeline_with_batches(CASE)
    loss = alone.step(*batches[0]).loss
    found = ranks.run(in_the_default_group, str(tmp_path), plan_file(CASE, tmp_path), ranks=2)
    assert found == [(loss, True)] * 2


def test_a_process_alone_is_a_world_of_one():
    for world in (World.alone(), World.default()):
        world.barrier()
        assert (world.rank, world.size, world.is_alone, world.device.torch.type) == (0, 1, True, "cpu")
        assert world.all_gather([1.5]) == [[1.5]]
        assert world.all_reduce([1.0, 2.0]) == [1.0, 2.0]
        assert world.all_gather_json({"a": 1}) == [{"a": 1}]
        assert world.broadcast(2.0, 0) == 2.0
        world.close()
