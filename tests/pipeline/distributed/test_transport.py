"""A world next to other people's groups, and frames between stages: what is posted when, and in flight."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from cases import Case, pipeline_of, pipeline_with_batches, plan_of
from programs import two_ranks
from reference import same_bits
from torch.distributed.device_mesh import init_device_mesh
from zoo import build

import penstock
from penstock import TransportError
from penstock.compression.buffers import Frame, Pool
from penstock.pipeline.distributed.process_group import World
from penstock.pipeline.distributed.transport import GlooTransport, LocalTransport
from penstock.pipeline.schedules.instruction import Op
from penstock.pipeline.schedules.messages import Message

MLP = Case(model="mlp", cuts=2)


def train(plan, world=None):
    """Losses and weights of a pipeline in this world, or told of none; the job's own group goes on."""
    pipe, batches = pipeline_with_batches(MLP, plan, world=world)
    rank, losses = pipe.rank, [pipe.step(*batch).loss for batch in batches]
    state = pipe.state_dict()["model"]
    pipe.close()
    ones = torch.ones(1)
    dist.all_reduce(ones)
    if world is None:
        assert pipe.world.group is None
    else:
        world.close()
    return rank, losses, state, int(ones)


def side_by_side(path, plan, whole):
    """Two pipelines of two ranks each inside one job of four, along a mesh and then in groups of the job; and
    one of four ranks that is told nothing of its group."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    store = dist.FileStore(path)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    with pytest.raises(TransportError, match="one dimension of a mesh, found 2; give"):
        World.from_mesh(mesh)
    found = [train(plan, World.from_mesh(mesh["pp"]))]
    pairs = [[0, 3], [1, 2]]  # ranks that do not begin at 0 nor lie side by side
    groups = [dist.new_group(pair) for pair in pairs]  # a rank outside of one gets no group
    (mine,) = [group for group in groups if isinstance(group, dist.ProcessGroup)]
    found += train(plan, World(mine)), train(whole)
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_pipelines_run_side_by_side_in_somebody_elses_job(ranks, tmp_path):
    alone, batches = pipeline_with_batches(MLP)
    expected = [alone.step(*batch).loss for batch in batches]
    weights = alone.state_dict()["model"]
    plans = [plan_of(Case(model="mlp", cuts=stages))[0] for stages in (2, 4)]
    of_ranks = ranks.run(side_by_side, str(tmp_path / "job"), *plans, ranks=4)
    lain = ([0, 0, 1, 1], [0, 0, 1, 1], [0, 1, 2, 3])
    for found, places in zip(zip(*of_ranks, strict=True), lain, strict=True):
        assert sorted(rank for rank, *_ in found) == places
        for rank, losses, state, ones in found:
            assert (losses, ones) == (expected, 4)
            assert rank or all(same_bits(state[name], weight) for name, weight in weights.items())


def test_a_process_alone_is_a_world_of_one():
    for world in (World(), World.default()):
        world.barrier()
        assert (world.rank, world.size, world.is_alone, world.device.torch.type) == (0, 1, True, "cpu")
        assert world.all_gather([1.5]) == [[1.5]]
        assert world.all_gather_json({"a": 1}) == [{"a": 1}]
        assert world.broadcast(2.0, 0) == 2.0
        world.close()


# Two values cross each of its cuts.
CASE = Case(model="residual", cuts=["_3_conv2", "_4_conv1"], micro_batches=5)


def test_frames_of_one_process_wait_for_their_stage():
    transport = LocalTransport(Pool())
    first, second = (Message(Op.F, 0, value, 0, 1) for value in (3, 4))
    one, other = (Frame(transport.pool.take(64), 64, transport.pool) for _ in range(2))
    messages = two_ranks(1)
    transport.send(first, one, messages)
    transport.send(second, other, messages)
    assert transport.receive(second) is other
    with pytest.raises(AssertionError, match="no stage asked for"):
        transport.end(messages)
    assert transport.receive(first) is one
    transport.end(messages)


def on_threads(work):
    """Results of ``work(pipeline, batches)`` on each of three ranks of the case; with its plan."""
    plan, _ = plan_of(CASE)
    built = [build(CASE.model) for _ in range(3)]

    def run(world):
        model, batches = built[world.rank]
        return work(pipeline_of(CASE, plan, model, world=world), batches)

    return plan, penstock.in_threads(run, ranks=3)


def calls_of_a_step(pipe, batches):
    """("post" | "send", other rank) in the order in which a rank calls its group."""
    world, calls = pipe.world, []
    post, send = world.irecv, world.isend
    world.irecv = lambda tensor, source, tag: calls.append(("post", source)) or post(tensor, source, tag=tag)
    world.isend = lambda tensor, target, tag: calls.append(("send", target)) or send(tensor, target, tag=tag)
    pipe.step(*batches[0])
    return calls


def test_receives_are_posted_before_the_first_send_and_two_ahead():
    _, found = on_threads(calls_of_a_step)
    for rank, calls in enumerate(found):
        others = {other for what, other in calls if what == "post"}
        ahead = [("post", other) for other in others] * 4  # two instructions, two values on each cut
        assert sorted(calls[: len(ahead)]) == sorted(ahead), (rank, calls[: len(ahead) + 1])
        counts = [[what for what, _ in calls].count(what) for what in ("post", "send")]
        assert counts == [5 * 2 * len(others)] * 2


@pytest.mark.parametrize(("max_in_flight", "expected"), [(1, {1}), (1 << 30, {4, 6})])
def test_bytes_in_flight_are_bounded(max_in_flight, expected):
    """Without a limit by what other ranks have not answered yet, however long a step is."""

    def most_in_flight(pipe, batches):
        transport, most = pipe.engine.frames.transport, []
        assert isinstance(transport, GlooTransport)
        transport.max_in_flight = max_in_flight
        send = transport.send

        def watch(message, frame, messages):
            send(message, frame, messages)
            most.append(len(transport.sending))

        transport.send = watch
        return [pipe.step(x, y).loss for x, y in batches], max(most)

    _, found = on_threads(most_in_flight)
    alone, batches = pipeline_with_batches(CASE)
    assert [losses for losses, _ in found] == [[alone.step(x, y).loss for x, y in batches]] * 3
    assert {most for _, most in found} == expected


def test_a_rank_holds_only_its_own_layers():
    plan, _ = plan_of(CASE)
    models = [build(CASE.model)[0] for _ in range(3)]

    def held(world):
        """Names of the parameters alive on this rank once the pipeline stands, and of those it trains."""
        model, models[world.rank] = models[world.rank], None
        alive = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
        pipe = pipeline_of(CASE, plan, model, world=world)
        del model
        gc.collect()
        return sorted(name for name, ref in alive.items() if ref() is not None), sorted(pipe.update.named)

    for stage, (alive, trained) in zip(plan.stages, penstock.in_threads(held, ranks=3), strict=True):
        assert alive == trained == sorted(stage.parameters)
