"""Frames between stages: what is posted when, what is in flight, what a rank keeps."""

import gc
import weakref

import pytest
import torch
from cases import Case, pipeline_of, plan_of
from programs import two_ranks
from zoo import build

import penstock
from penstock.compression.pool import Frame
from penstock.pipeline.ranks.transport import GlooTransport, LocalTransport
from penstock.pipeline.ranks.world import World
from penstock.pipeline.schedules.instruction import Op
from penstock.pipeline.schedules.messages import Message

CASE = Case(model="resnet18", cuts=["layer1_0_conv2", "layer2_1_relu"], micro_batches=5)


def test_frames_of_one_process_wait_for_their_stage():
    transport = LocalTransport()
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


def rank_pipeline(plan_path):
    model, batches = build(CASE.model)
    return pipeline_of(CASE, penstock.Plan.load(plan_path), model), batches


def calls_of_a_step(plan_path):
    """("post" | "send", other rank) in the order in which a rank calls gloo."""
    pipe, batches = rank_pipeline(plan_path)
    world, calls = pipe.world, []
    post, send = world.irecv, world.isend
    world.irecv = lambda tensor, source, tag: calls.append(("post", source)) or post(tensor, source, tag=tag)
    world.isend = lambda tensor, target, tag: calls.append(("send", target)) or send(tensor, target, tag=tag)
    pipe.step(*batches[0])
    return calls


@pytest.mark.ranks
def test_receives_are_posted_before_the_first_send_and_two_ahead(ranks, tmp_path):
    plan, _ = plan_of(CASE)
    plan.save(tmp_path / "plan.json")
    for rank, calls in enumerate(ranks.run(calls_of_a_step, str(tmp_path / "plan.json"), ranks=3)):
        others = {other for what, other in calls if what == "post"}
        ahead = [
            ("post", other) for other in others for _ in range(4)
        ]  # two instructions, two values on each cut
        assert sorted(calls[: len(ahead)]) == sorted(ahead), (rank, calls[: len(ahead) + 1])
        counts = [[what for what, _ in calls].count(what) for what in ("post", "send")]
        assert counts == [5 * 2 * len(others)] * 2


def losses_with_a_narrow_pipe(plan_path, max_in_flight):
    pipe, batches = rank_pipeline(plan_path)
    transport = pipe.engine.transport
    assert isinstance(transport, GlooTransport)
    transport.max_in_flight = max_in_flight
    most = []
    send = transport.send

    def watch(message, frame, messages):
        send(message, frame, messages)
        most.append(len(transport.sending))

    transport.send = watch
    return [pipe.step(x, y).loss for x, y in batches], max(most)


@pytest.mark.ranks
def test_bytes_in_flight_are_bounded(ranks, tmp_path):
    plan, _ = plan_of(CASE)
    plan.save(tmp_path / "plan.json")
    narrow = ranks.run(losses_with_a_narrow_pipe, str(tmp_path / "plan.json"), 1, ranks=3)
    wide = ranks.run(losses_with_a_narrow_pipe, str(tmp_path / "plan.json"), 1 << 30, ranks=3)
    assert [losses for losses, _ in narrow] == [losses for losses, _ in wide]
    assert {most for _, most in narrow} == {1}
    assert max(most for _, most in wide) > 1


def held_parameters(plan_path):
    """Names of the parameters alive on this rank once the pipeline stands, and of those it trains."""
    model, _ = build(CASE.model)
    alive = {name: weakref.ref(parameter) for name, parameter in model.named_parameters()}
    pipe = pipeline_of(CASE, penstock.Plan.load(plan_path), model)
    del model
    gc.collect()
    return sorted(name for name, ref in alive.items() if ref() is not None), sorted(pipe.update.named)


@pytest.mark.ranks
def test_a_rank_holds_only_its_own_layers(ranks, tmp_path):
    plan, _ = plan_of(CASE)
    plan.save(tmp_path / "plan.json")
    found = ranks.run(held_parameters, str(tmp_path / "plan.json"), ranks=3)
    for stage, (alive, trained) in zip(plan.stages, found, strict=True):
        assert alive == trained == sorted(stage.parameters)


def words(number):
    """What the small exchanges beside frames give on this rank."""
    world = World.default()
    rank = world.rank
    rows = world.gather([torch.arange(rank + 1, dtype=torch.uint8)] * rank)
    return (
        world.all_gather([rank + 0.1, number]),
        world.all_gather_json({"rank": rank, "text": "x" * (10**rank)}),
        None if rows is None else [[row.tolist() for row in row_of_rank] for row_of_rank in rows],
        world.broadcast(float(rank * 7), 2),
    )


@pytest.mark.ranks
def test_ranks_exchange_numbers_json_and_frames(ranks):
    for rank, (numbers, notes, rows, shared) in enumerate(ranks.run(words, 5.0, ranks=3)):
        assert numbers == [[r + 0.1, 5.0] for r in range(3)]
        assert notes == [{"rank": r, "text": "x" * (10**r)} for r in range(3)]
        assert rows == (None if rank else [[], [[0, 1]], [[0, 1, 2], [0, 1, 2]]])
        assert shared == 14.0


def test_a_world_of_one_answers_alike():
    world = World.default()
    assert world.all_gather([1.5]) == [[1.5]]
    assert world.all_reduce([1.5]) == [1.5]
    assert world.all_gather_json({"a": 1}) == [{"a": 1}]
    assert world.broadcast(2.0, 0) == 2.0
    assert (world.rank, world.size, world.is_alone) == (0, 1, True)
