"""Law L7: a rank that fails, dies or never starts ends all within the deadline, and is named."""

import builtins
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from zoo import cross_entropy, images

import penstock
from penstock.pipeline.ranks import notices
from penstock.pipeline.ranks.links import measured_rates
from penstock.pipeline.ranks.world import World, found
from penstock.scripts.bench import shaped_links as links

DEADLINE = 4.0  # seconds; less, and on a busy machine the wrong rank is late


def end(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how in ("SystemExit", "KeyboardInterrupt"):
        raise getattr(builtins, how)
    raise ValueError("the sky fell")


def train(how):
    """Two ranks; the second stage's third forward (or backward) of the first step ends in ``how``."""
    calls = [0]

    def hook(module, args):
        calls[0] += 1
        if dist.is_initialized() and dist.get_rank() == 1 and calls[0] == 3 and how != "raise in backward":
            end(how)

    def backward_hook(gradient):
        calls[0] += 1
        if dist.get_rank() == 1 and calls[0] == 3:
            end("raise")
        return gradient

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(1), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 10))
    x, y = images(8)[0]
    example = (x[:3].clone(),)
    plan = penstock.partition(
        penstock.measure(penstock.trace(model, example), example), cuts=["_1"], micro_batches=4
    )
    pipe = penstock.Pipeline(model, plan, loss=cross_entropy, optimizer=sgd, deadline=DEADLINE)
    if how == "raise in backward":
        model[3].register_forward_hook(lambda module, args, out: out.register_hook(backward_hook) and None)
    else:
        model[3].register_forward_pre_hook(hook)
    pipe.step(x, y)


def sgd(named):
    return torch.optim.SGD(named, lr=0.1)


def outcome(ranks, how):
    ranks.start(2)  # which does not count
    begun = time.monotonic()
    results = ranks.try_run(train, how, ranks=2)
    return [text for text, _ in results], time.monotonic() - begun


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("how", "direction"), [("raise", "forward"), ("raise in backward", "backward")])
def test_an_exception_in_a_stage_is_named_by_every_rank(how, direction, ranks):
    texts, seconds = outcome(ranks, how)
    where = f"rank 1, stage 1, {direction} of micro-batch 2, step 0"
    assert "StageError" in texts[1]
    assert "ValueError: the sky fell" in texts[1]
    assert where in texts[1]
    assert "TransportError" in texts[0]
    assert where in texts[0], texts[0]
    assert seconds < DEADLINE + 30


@pytest.mark.slow
@pytest.mark.ranks
def test_a_killed_rank_is_named_by_its_neighbour():
    pool = Ranks()
    try:
        texts, seconds = outcome(pool, "kill")
    finally:
        pool.close()
    assert texts[1] == "the process died"
    assert "TransportError" in texts[0]
    assert "rank 0, stage 0" in texts[0]
    assert "rank 1" in texts[0]
    assert seconds < DEADLINE + 30


@pytest.mark.ranks
def test_a_rank_that_never_starts_is_named(tmp_path):
    store = dist.FileStore(str(tmp_path / "rendezvous"), 3)  # type: ignore[attr-defined]
    store.set("penstock/joined/1", "")
    begun = time.monotonic()
    with pytest.raises(penstock.PenstockError, match=r"^rank 2 of 3 did not join within 1 s"):
        found(store, rank=0, ranks=3, deadline=1)
    assert time.monotonic() - begun < 10


def told_by(call):
    """What a rank tells that loses the group in ``call``; the pool goes on with a new group."""
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()
    return ""


def meet_without(absent):
    """All but one rank meet; that one has left, and has not said so."""
    world = World.default()
    world.barrier()
    return told_by(lambda: None if world.rank == absent else world.barrier())


@pytest.mark.slow
@pytest.mark.ranks
def test_who_gives_no_sign_of_life_is_named_by_a_collective(ranks):
    told = ranks.run(meet_without, 2, ranks=3, deadline=5)
    for rank in (0, 1):
        assert told[rank].startswith(
            f"TransportError: rank {rank} lost the group of ranks: rank 2 did not answer"
        )


def measure_alone():
    world = World.default()
    return told_by(lambda: measured_rates(world, [(0, 1)], deadline=2) if world.rank == 0 else None)


@pytest.mark.ranks
def test_a_link_that_cannot_be_measured_names_its_other_end(ranks):
    told, _ = ranks.run(measure_alone, ranks=2)
    assert told.startswith("TransportError: rank 0 could not measure its link with rank 1 within 2 s: ")


def step_that_ends(how):
    return told_by(lambda: train(how))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("SystemExit", "StageError: rank 1, stage 1, forward of micro-batch 2, step 0: SystemExit"),
        ("KeyboardInterrupt", "KeyboardInterrupt: "),
    ],
)
def test_what_is_no_exception_ends_a_step_by_name_as_well(how, told, ranks):
    peer, own = ranks.run(step_that_ends, how, ranks=2)
    assert own == told
    assert f"rank 1, stage 1, forward of micro-batch 2, step 0: {how}" in peer


def test_a_store_that_does_not_answer_once_is_not_asked_again():
    begun = time.monotonic()
    answer = threading.Event()
    with pytest.raises(TimeoutError, match=r"did not answer within 0\.1 s"):
        notices.bounded(answer.wait, seconds=0.1)
    asked = []
    with pytest.raises(TimeoutError, match="did not answer before"):
        notices.bounded(lambda: asked.append(1), seconds=60)
    answer.set()
    assert not asked
    assert time.monotonic() - begun < 30
    while any(thread.name.startswith("penstock-store") for thread in threading.enumerate()):
        time.sleep(0.01)
    assert notices.bounded(lambda: 5, seconds=60) == 5


LINK_DOWN = """
import sys, torch, penstock
from torch import nn
torch.set_num_threads(1)
penstock.init(deadline=30)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
x, y = torch.randn(8, 8), torch.arange(8) % 4
profile = penstock.measure(penstock.trace(model, (x[:4],)), (x[:4],), repeats=1)
pipe = penstock.Pipeline(
    model, penstock.partition(profile, cuts=["_1"], micro_batches=2), loss=nn.functional.cross_entropy,
    optimizer=lambda named: torch.optim.SGD(named, lr=0.01), deadline=10,
)
try:
    while True:
        pipe.step(x, y)
        print("step", flush=True)
except penstock.TransportError as error:
    print(error, flush=True)
"""


@pytest.mark.ranks
@pytest.mark.slow
def test_a_link_that_goes_down_ends_both_ranks_even_the_one_whose_store_is_beyond_it(tmp_path):
    link = links.parse_link("1Gbit")
    if reason := links.why_not(link):
        pytest.skip(f"no network namespaces here: {reason}")
    (tmp_path / "script.py").write_text(LINK_DOWN)
    with links.joined(link) as ends, contextlib.ExitStack() as stack:
        started = [stack.enter_context(script_on(end, rank, tmp_path)) for rank, end in enumerate(ends)]
        try:
            for process in started:
                assert process.stdout is not None
                assert process.stdout.readline() == "step\n"
            subprocess.run([*ends[0], *f"ip link set {links.DEVICE} down".split()], check=True)
            told = [process.communicate(timeout=60)[0].splitlines()[-1] for process in started]
        finally:
            for process in started:
                process.kill()
    assert [process.returncode for process in started] == [0, 0]
    assert "did not arrive from rank 1 within 10 s" in told[0]
    assert "did not arrive from rank 0 within 10 s" in told[1]


def script_on(end, rank, folder):
    """A rank as a foreign launcher starts it: it meets at a store that listens, which rank 0 holds."""
    surroundings = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": links.ADDRESSES[0]}
    surroundings |= {"MASTER_PORT": "29400", "GLOO_SOCKET_IFNAME": links.DEVICE}
    return subprocess.Popen(
        [*end, sys.executable, str(folder / "script.py")],
        env=os.environ | surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
