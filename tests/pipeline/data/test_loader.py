"""Batches that are loaded ahead: the same bytes in the same order by however many processes."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loading import NUMBER, Damaged, Deadly, Drawn, Numbered, Slow, Stream, Where, write_images
from processes import runs, wait_for_the_end
from reference import same_bits, same_tree
from torch.utils.data import DataLoader, TensorDataset

from penstock import ConfigError, TransportError
from penstock.pipeline.data import image_folder
from penstock.pipeline.data.batches import BatchIndex, BatchReader, Needs
from penstock.pipeline.data.loader import BatchLoader, workers_of
from penstock.pipeline.data.samples import samples_of
from penstock.pipeline.data.text import load as text

PLACES = [
    *(BatchIndex("train", 0, number) for number in range(5)),
    *(BatchIndex("test", 0, number) for number in range(6)),
    *(BatchIndex("train", 1, number) for number in range(5)),
]


def reading(table: Any, **options: Any) -> BatchReader:
    made = samples_of((table, table), target="my.data", batch_size=None)
    assert made.test is not None
    return BatchReader(tables={"train": made.train, "test": made.test}, batch_size=4, seed=3, **options)


def taken(reads: BatchReader, places: Iterable[BatchIndex] = PLACES, **options: Any) -> list[Any]:
    with contextlib.closing(BatchLoader(reads, places, **options)) as loader:
        return [loader.take(place) for place in places]


def tables_of(table: Any) -> list[Any]:
    return list(reading(table).tables.values())


@pytest.mark.parametrize("table", [Drawn(), Stream()], ids=["drawn", "stream"])
def test_the_bytes_and_the_order_are_those_of_no_process_and_of_a_run_that_goes_on(table):
    plain = taken(reading(table))
    assert len({float(inputs.sum()) for inputs, _ in plain}) == len(PLACES)
    assert same_tree(plain, taken(reading(table), workers=workers_of(4, tables_of(table), cores=1)))
    assert same_tree(plain[3:], taken(reading(table), PLACES[3:], workers=1))


@pytest.mark.slow
def test_the_bytes_are_those_of_a_process_that_is_spawned():
    assert same_tree(taken(reading(Drawn())), taken(reading(Drawn()), workers=2, start="spawn"))


def test_the_threads_of_the_run_change_no_byte():
    one = taken(reading(Drawn()))
    torch.set_num_threads(2)  # every test begins with one
    assert same_tree(one, taken(reading(Drawn())))
    assert torch.get_num_threads() == 2


def test_nobody_elses_generator_moves():
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(7)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    taken(reading(Drawn()), workers=2)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert before[2] == np.random.get_state()[1].tolist()  # type: ignore[index]


def test_others_load_with_one_thread_each_and_end_with_the_loader():
    loader = BatchLoader(reading(Where()), PLACES, workers=2)
    found = [loader.take(place) for place in PLACES]
    readers = {int(pid) for inputs, _ in found for pid in inputs.flatten().tolist()}
    assert len(readers) == 2
    assert os.getpid() not in readers
    assert {int(threads) for _, targets in found for threads in targets} == {1}
    loader.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in readers)


def test_waiting_is_counted_and_hides_behind_what_is_done_meanwhile():
    waits = {}
    for workers in (0, 2):
        loader = BatchLoader(reading(Slow()), PLACES, workers=workers)
        loader.take(PLACES[0])
        began = loader.waited
        for place in PLACES[1:6]:
            time.sleep(0.1)
            loader.take(place)
        waits[workers] = loader.waited - began
        assert loader.figures["waited_seconds"] == loader.waited
        loader.close()
    assert waits[0] > 0.15  # 19 samples of 10 ms
    assert waits[2] < waits[0] / 2


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_is_named(workers):
    with pytest.raises(ConfigError, match=r"^train sample 7 cannot be read: OSError: .*Input/output") as told:
        taken(reading(Damaged(7)), workers=workers)
    assert "data.skip_broken=true" in str(told.value)
    assert "tests/support/loading.py" in told.value.__notes__[0]  # where, for who reads the traceback


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_cannot_be_read_are_left_out_if_asked(workers):
    damaged, said = (2, 7, 8, 19), list[str]()
    loader = BatchLoader(reading(Damaged(*damaged), skips=True), PLACES, workers=workers, tell=said.append)
    found = [loader.take(place) for place in PLACES]
    loader.close()
    whole = taken(reading(Damaged()))
    for (_, left), (_, all_of) in zip(found, whole, strict=True):
        assert left.tolist() == [number for number in all_of.tolist() if number not in damaged]
    left_out = sum(number in damaged for _, all_of in whole for number in all_of.tolist())
    assert loader.broken == loader.figures["left_out"] == left_out
    assert len(said) == 3
    assert said[0].startswith("left out: train sample ")
    assert said[2].endswith("; others are only counted")


class Ragged(Numbered):
    """One sample is longer than the others."""

    def __getitem__(self, index):
        return torch.zeros(3 if index == 7 else 2), torch.tensor(index)


def test_the_sample_of_another_shape_is_named_and_not_its_innocent_neighbour():
    with pytest.raises(
        ConfigError, match=r"train sample 7 .*: its shapes are \(\(3,\), \(\)\), .*pad or crop it"
    ):
        taken(reading(Ragged()))
    found = taken(reading(Ragged(), skips=True))
    assert 7 not in torch.cat([targets for _, targets in found]).tolist()


def test_data_whose_first_samples_cannot_be_read_are_described_by_another_if_asked():
    options: Any = {"target": "my.data", "batch_size": None}
    with pytest.raises(ConfigError, match=r"train sample 0 .*data.skip_broken=true"):
        samples_of(Damaged(0, 1), **options)
    assert samples_of(Damaged(0, 1), skips=True, **options).describe.input_shape == (1,)
    with pytest.raises(ConfigError, match=r"(?m)train sample 0 .* mend or remove it$"):
        samples_of(Damaged(*range(NUMBER)), skips=True, **options)


class Uneven(Damaged):
    """Samples that make no batch."""

    def __getitem__(self, index: int) -> Any:
        return torch.ones(1 + index % 2), torch.tensor(index)


@pytest.mark.parametrize(
    ("table", "workers", "error", "subject"),
    [
        (Damaged(4, 5, 6, 7), 0, ConfigError, r"(?m)\(3 more of its batch\), and .* mend or remove it$"),
        (Uneven(), 0, ConfigError, "train sample 0 cannot be read: RuntimeError: stack expects"),
        (Deadly(), 1, TransportError, "a process that loads samples was lost .*lower data.workers"),
    ],
)
def test_a_batch_of_which_nothing_can_be_had_ends_the_run(table, workers, error, subject):
    with pytest.raises(error, match=subject):
        taken(reading(table, skips=True, shuffled=()), workers=workers)


def test_a_process_that_has_stopped_is_named_and_ended():
    loader: Any = BatchLoader(reading(Slow()), PLACES, workers=1, deadline=0.4)
    loader.take(PLACES[0])
    pid = loader._batches._workers[0].pid
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(TransportError, match=f"process {pid}, which loads samples, had stopped, .* 0.1 s"):
        [loader.take(place) for place in PLACES[1:]]
    loader.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_cannot_leave_a_process_is_named_and_nobody_waits_for_it():
    class Odd(Damaged):
        def __getitem__(self, index: int) -> Any:
            return torch.ones(1), threading.Lock()

    loads = DataLoader(Odd(), collate_fn=lambda items: (items[0][0], items))
    odd = samples_of(loads, target="my.data", batch_size=None)
    reads = BatchReader(tables={"train": odd.train}, batch_size=4, seed=0)
    with pytest.raises(ConfigError, match=r"a lock cannot leave the process .*take data.workers=0"):
        taken(reads, PLACES[:1], workers=1)


LOADS = """
import os, sys, torch
from torch.utils.data import TensorDataset
from penstock.pipeline.data.samples import samples_of
from penstock.pipeline.data.loader import BatchLoader
from penstock.pipeline.data.batches import BatchIndex, BatchReader

if __name__ == "__main__":
    data = TensorDataset(torch.ones(8, 1), torch.ones(8))
    tables = {"train": samples_of(data, target="my.data", batch_size=None).train}
    places = [BatchIndex("train", epoch, 0) for epoch in range(99)]
    reading = BatchReader(tables=tables, batch_size=4, seed=0)
    loader = BatchLoader(reading, places, workers=2, start=sys.argv[1])
    loader.take(places[0])
    print(*(one.pid for one in loader._batches._workers), flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_who_loads_ends_with_a_rank_that_is_killed(start, tmp_path):
    (tmp_path / "loads.py").write_text(LOADS)
    asked = [sys.executable, "loads.py", start]
    with subprocess.Popen(asked, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        loads = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(loads) == 2
        assert all(map(runs, loads))
        rank.kill()
    wait_for_the_end(*loads)


def images(root: Path) -> Any:
    return image_folder.load(root=write_images(root, train=3, test=3), size=4)


@pytest.fixture(params=["images", "text"])
def samples(request, tmp_path):
    if request.param == "images":
        return images(tmp_path)
    texts = tmp_path / "text"
    texts.write_text("penstock " * 40)
    return text(path=str(texts), length=8)


def same_form(part, whole, *, there):
    """A part of a batch is that of the whole, or has its form and no memory."""
    assert part.is_meta != there
    assert (part.shape, part.dtype, part.stride()) == (whole.shape, whole.dtype, whole.stride())
    return part.is_meta or same_bits(part, whole)


FIRST = BatchIndex("train", 0, 0)


def test_a_rank_reads_only_what_it_computes_with(samples):
    (whole,) = taken(parts(samples), [FIRST])
    for needed in ((True, False), (False, True), (False, False)):
        (found,) = taken(parts(samples, needs=Needs(inputs=needed[0], targets=needed[1])), [FIRST])
        assert all(same_form(*one, there=there) for *one, there in zip(found, whole, needed, strict=True))


def test_replicas_read_their_own_micro_batches(samples):
    (whole,) = taken(parts(samples), [FIRST])
    expected = whole[0].tensor_split(3)
    for own in ((True, False, True), (False, True, False), (False,) * 3):
        ((inputs, targets),) = taken(parts(samples, needs=Needs(split=own, test=False)), [FIRST])
        assert same_bits(targets, whole[1])
        rows = zip(inputs.micro_batches, expected, own, strict=True)
        assert all(same_form(part, there_is, there=there) for part, there_is, there in rows)
    few = parts(samples, needs=Needs(split=(False,) * 9))  # a batch of fewer samples than micro-batches
    ((inputs, _),) = taken(few, [FIRST])
    assert len(inputs.micro_batches) == 4
    tests = BatchReader(tables={"test": samples.test}, batch_size=4, seed=0, needs=Needs(test=False))
    assert taken(tests, [BatchIndex("test", 0, 0)])[0][0].is_meta


def parts(samples: Any, **options: Any) -> BatchReader:
    return BatchReader(tables={"train": samples.train}, batch_size=4, seed=0, **options)


def test_who_needs_no_image_opens_none(tmp_path):
    samples = images(tmp_path)
    for file in tmp_path.rglob("*.png"):
        file.unlink()
    ((inputs, targets),) = taken(parts(samples, needs=Needs(inputs=False)), [FIRST])
    assert inputs.is_meta
    assert sorted({*targets.tolist()}) == [0, 1]
    with pytest.raises(ConfigError, match=r"train sample \d \(.*png\) cannot be read|png is not an image"):
        taken(parts(samples), [FIRST])


@pytest.mark.parametrize(
    ("asked", "table", "cores", "found"),
    [
        ("auto", TensorDataset(torch.ones(3, 1), torch.ones(3)), 8, 0),
        ("auto", Damaged(), 8, 4),
        ("auto", Damaged(), 3, 3),
        ("auto", Damaged(), -1, 1),
        ("auto", Stream(), 8, 1),
        (0, Damaged(), 8, 0),
        (6, Damaged(), 1, 6),
        (6, Stream(), 1, 1),
        (2, TensorDataset(torch.ones(3, 1), torch.ones(3)), 8, 2),
    ],
)
def test_how_many_processes_load(asked, table, cores, found):
    assert workers_of(asked, tables_of(table), cores=cores) == found
