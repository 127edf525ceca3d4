"""Frames between stages: what is posted when, what is in flight, what a rank keeps."""

import gc
import weakref

import pytest
from cases import Case, pipeline_of, pipeline_with_batches, plan_of
from programs import two_ranks
from zoo import build

import penstock
from penstock.compression.buffers import Frame
from penstock.pipeline.distributed.transport import GlooTransport, LocalTransport
from penstock.pipeline.schedules.instruction import Op
from penstock.pipeline.schedules.messages import Message

# Two values cross each of its cuts.
CASE = Case(model="residual", cuts=["_3_conv2", "_4_conv1"], micro_batches=5)


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


@pytest.mark.parametrize(("max_in_flight", "expected"), [(1, {1}), (1 << 30, {10, 20})])
def test_bytes_in_flight_are_bounded(max_in_flight, expected):
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
