"""Samples of a run: the bits are those of a run that loads as it goes, every batch in its turn."""

import contextlib
import copy
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from brokers import PAGE, broker_thread, client, state, within
from commands import lines, refusal, summary, trained
from hypothesis import given
from hypothesis import strategies as st
from loading import write_images
from torch import nn

import penstock
from penstock.conf.schema import TrainConfig
from penstock.pipeline.data.cache.policies import policy
from penstock.pipeline.data.digits import load
from penstock.pipeline.data.random_draws import order_of
from penstock.pipeline.run.training_loop import Course, course, loader

JOB = (
    "data=image_folder data.root=images data.size=8 model=mlp model.hidden=[16,12,8] batch_size=6"
    " micro_batches=3 epochs=2 seed=3 threads=1 schedule=gpipe codec=raw extra_in_flight=0"
)


@pytest.fixture(autouse=True)
def images(tmp_path):
    write_images(tmp_path / "images", train=10, test=3)


def train(folder, more=""):
    trained(f"{JOB} {more} hydra.run.dir={folder}")
    losses = [line["loss"] for line in lines(folder)]
    return Path(folder, "model.safetensors").read_bytes(), losses, summary(folder)


def test_the_bits_do_not_hang_on_who_loads_nor_on_the_sample_cache(tmp_path, capfd):
    plain = train("plain", "ranks=1 stages=2 data.workers=0")
    ahead = train("ahead", "ranks=1 stages=2 data.workers=2")
    assert "waited for samples: " in capfd.readouterr().out
    path = tmp_path / "s" / "cache.sock"
    with broker_thread(path, policy("next_use", 12 * PAGE, keep=600)):
        through = f"ranks=1 stages=2 data.workers=2 cache=shared cache.socket={path}"
        shared = train("shared", through)
        assert not state(path)["jobs"]  # it has left
        again = train("again", through)
    assert plain[:2] == ahead[:2] == shared[:2] == again[:2]
    assert again[2]["data"][0]["cache"]["hits"] > shared[2]["data"][0]["cache"]["hits"]  # kept in between
    assert ahead[2]["test_loss"] == plain[2]["test_loss"]
    assert [run[2]["data"][0]["workers"] for run in (plain, ahead)] == [0, 2]
    cache = shared[2]["data"][0]["cache"]
    assert cache["hits"] + cache["loads"] == 36  # of two epochs; the test passes it by
    assert cache["hits"] > 6
    assert cache["times"]["epoch"] > 0
    out = capfd.readouterr().out
    assert "sample cache: " in out
    assert "its first epoch: " in out


@pytest.mark.ranks
@pytest.mark.slow
def test_a_run_waits_on_all_ranks_for_its_turn_to_warm_up(tmp_path, capfd):
    path = tmp_path / "s" / "cache.sock"
    with broker_thread(path, policy("gain", 12 * PAGE), alone=True):
        first = client(path, "a")
        assert first.has_turn()

        def leave():
            within(60, lambda: len(state(path)["jobs"]) == 2)
            time.sleep(11)  # longer than ranks wait for each other
            first.close()

        other = threading.Thread(target=leave)
        other.start()
        run = train("run", f"ranks=2 deadline=10 cache=shared cache.socket={path}")
        other.join()
        assert run[2]["data"][0]["cache"]["times"]["epoch"] > 0
    out = " ".join(capfd.readouterr().out.split())
    assert out.count("waits until the first epoch of another job is over") == 1


@pytest.mark.ranks
@pytest.mark.slow
def test_the_rank_in_the_middle_loads_nothing_unless_all_leave_the_same_samples_out():
    whole = train("whole", "ranks=3 data.workers=1")
    assert [row["workers"] for row in whole[2]["data"]] == [1, 0, 0]
    first = int(order_of(20, seed=3, epoch=0)[0])  # which is in the example, too
    for name in (f"train/{'cats' if first < 10 else 'dogs'}/{first % 10}.png", "test/dogs/1.png"):
        Path("images", name).write_bytes(b"no image")
    plain = train("plain", "ranks=1 stages=3 data.skip_broken=true data.workers=0")
    ranks = train("ranks", "ranks=3 data.skip_broken=true data.workers=1")
    assert ranks[:2] == plain[:2]
    assert ranks[2]["test_loss"] == plain[2]["test_loss"]
    assert [row["workers"] for row in ranks[2]["data"]] == [1, 1, 1]
    assert {row["left_out"] for row in plain[2]["data"] + ranks[2]["data"]} == {4}  # twice, with a test each


@pytest.mark.slow
@pytest.mark.ranks
def test_two_runs_side_by_side_share_a_cache_and_keep_their_bits(tmp_path):
    path = tmp_path / "s" / "cache.sock"
    plain = {seed: train(f"plain{seed}", f"ranks=2 seed={seed}") for seed in (3, 4)}
    with broker_thread(path, policy("next_use", 12 * PAGE)):
        words = [*JOB.split(), "ranks=2", "data.workers=1", "cache=shared", f"cache.socket={path}"]
        train_it = [sys.executable, "-m", "penstock", "train", *words]
        both = [subprocess.Popen([*train_it, f"seed={seed}", f"hydra.run.dir=run{seed}"]) for seed in (3, 4)]
        assert [process.wait(300) for process in both] == [0, 0]
        within(10, lambda: not state(path)["jobs"])
    for seed in (3, 4):
        assert Path(f"run{seed}", "model.safetensors").read_bytes() == plain[seed][0]


def test_what_cannot_be_cached_is_refused_and_what_lies_in_memory_told(capfd):
    Path("mine.py").write_text(
        "import torch\nclass Mine:\n    def __len__(self): return 12\n"
        "    def __getitem__(self, i): return torch.ones(3, 8, 8) * i, i % 2\n"
        "def data(): return Mine(), Mine()\n"
    )
    job = JOB.replace("data=image_folder data.root=images data.size=8 ", "")
    error = refusal(f"{job} data._target_=mine.data cache=shared ranks=1", capfd)
    assert "cache.decoded=true" in error
    assert "a Mine has no read(index) -> bytes" in error
    trained(f"{job} data=digits max_steps=1 cache=shared ranks=1")
    assert "these samples lie in memory" in capfd.readouterr().out
    assert "cache=redis is not known" in refusal(f"{job} cache=redis", capfd)
    assert "cache.backend=foo://x is" in refusal(f"{job} cache=shared cache.backend=foo://x", capfd)
    assert "cache.share=25.0 must be" in refusal(f"{job} cache=shared cache.share=25", capfd)


@pytest.mark.ranks
@pytest.mark.slow
def test_the_five_systems_in_one_run(tmp_path):
    """Stages on ranks, activations and parameters on disk, replicas, a cache by gain, weights first."""
    path = tmp_path / "s" / "cache.sock"
    wide = "model.hidden=[256,128] micro_batches=4 batch_size=8 stages=2"
    on_disk = "memory.tier=disk memory.parameters=disk weights_first=true"
    plain = train("plain", f"{wide} ranks=1")
    buffered = f"{wide} schedule=1f1b weights=double_buffered"
    behind = train("behind", f"{buffered} ranks=1")
    with broker_thread(path, policy("gain", 12 * PAGE)):
        cached = f"{on_disk} cache=shared cache.socket={path}"
        all_five = train("all", f"{wide} {cached} ranks=4 replicas.count=2 replicas.exact=true")
        streamed = train("streamed", f"{buffered} {cached} ranks=2")
    assert all_five[:2] == plain[:2]
    assert streamed[:2] == behind[:2]
    told = all_five[2]
    assert told["bytes_exchanged"] > 0
    assert {row["tier"] for row in told["tiers"]} >= {"device", "disk"}
    caches = [row["cache"] for row in told["data"] if "cache" in row]
    assert [cache["hits"] + cache["loads"] for cache in caches] == [32, 32]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.integers(1, 25), st.integers(0, 6))
def test_it_is_the_rest_of_the_whole_course_from_every_step_on(epochs, length, tests, most, every):
    steps = min(epochs * length, most)
    options = {"epochs": epochs, "steps": steps, "steps_of_an_epoch": length, "tests": tests, "every": every}
    whole_course = Course(**options)
    whole = list(whole_course)
    assert list(whole_course) == whole  # it may be gone through twice
    trained = [place for place in whole if place.split == "train"]
    assert [place.epoch * length + place.number for place in trained] == list(range(steps))
    tested = [place.number for place in whole if place.split == "test"]
    moments = {*range(length, steps, length), steps} | ({*range(every, steps, every)} if every else set())
    assert tested == [*range(tests)] * len(moments)
    for done in range(steps + 1):
        rest = list(Course(**options, done=done))
        assert rest == whole[len(whole) - len(rest) :]
        assert sum(place.split == "train" for place in rest) == steps - done
        assert sum(place.split == "test" for place in rest) >= tests  # of the epoch that ended with it, too


@pytest.mark.parametrize(
    ("shares", "follows"), [([1, 1, 1], None), ([2, 1, 1], None), ([3, 1, 0], None), ([1, 1, 1], "measured")]
)
def test_each_replica_reads_its_own_micro_batches_where_it_knows_ahead_which(shares, follows, tmp_path):
    samples, config = load(size=8, channels=1), TrainConfig(batch_size=40, micro_batches=4)
    x = torch.zeros(40, 1, 8, 8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    profile = penstock.measure(penstock.trace(model, (x[:10],)), (x[:10],), repeats=1)
    plan = penstock.partition(profile, stages=1, replicas=3, shares=shares, micro_batches=4, codec="raw")
    models = [copy.deepcopy(model) for _ in range(3)]

    def train(world):
        sgd = {"loss": nn.functional.cross_entropy, "optimizer": torch.optim.SGD}
        pipe = penstock.Pipeline(models[world.rank], plan, **sgd, world=world, shares=follows)
        ahead = course(config, samples, done=0)
        with contextlib.closing(loader(config, samples, pipe, ahead, folder=tmp_path, tell=print)) as loads:
            batch, _ = loads.take(next(iter(ahead)))
            return pipe.reads_tests(), batch

    found = penstock.in_threads(train, ranks=3)
    assert [tests for tests, _ in found] == [True, False, False]
    if follows:
        assert all(isinstance(batch, torch.Tensor) and not batch.is_meta for _, batch in found)
        return
    for m in range(4):
        has = [rank for rank, (_, batch) in enumerate(found) if not batch.micro_batches[m].is_meta]
        assert has == [plan.rank_of(0, m)]
