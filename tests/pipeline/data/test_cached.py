"""Law L5: whatever goes through the sample cache has the order and the bytes of a run without it."""

import contextlib
import math
import os
import random
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from brokers import PAGE, broker_thread, state, within
from hypothesis import example, given
from hypothesis import strategies as st
from loading import SHARED as NUMBER
from loading import Drawing, Readable, Stream, write_images
from PIL import Image
from processes import free_port
from reference import same_bits, same_tree
from torch.utils.data import DataLoader, Dataset, Subset

import penstock
from penstock import ConfigError, PenstockError
from penstock.pipeline.data.batches import BatchIndex, BatchReader
from penstock.pipeline.data.cache.policies import policy
from penstock.pipeline.data.cache.sample_bytes import from_bytes, to_bytes
from penstock.pipeline.data.cached import CachedDataset, cache_reader, sample_source
from penstock.pipeline.data.loader import BatchLoader, WarmUp
from penstock.pipeline.data.samples import samples_of

EPOCHS = 3
BATCH = 7
PLACES = [BatchIndex("train", epoch, number) for epoch in range(EPOCHS) for number in range(NUMBER // BATCH)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "s" / "cache.sock"


def batches(dataset: Any, path: Any = None, *, workers: int = 0) -> Any:
    """The batches of a run, and what its loader tells."""
    through = {}
    if path is not None:
        counts: Any = {"num_samples": NUMBER, "batch_size": BATCH, "epochs": EPOCHS}
        source = sample_source(dataset, decoded=True)
        through["train"] = cache_reader(source, job="a", socket=path, data="", **counts)
        dataset = CachedDataset(dataset, through["train"])
    table = samples_of(dataset, target="my.data", batch_size=None).train
    options: Any = {"through": through, "epochs": EPOCHS, "used": NUMBER // BATCH * BATCH}
    reads = BatchReader(tables={"train": table}, batch_size=BATCH, seed=0, **options)
    warm_up = WarmUp(batches=NUMBER // BATCH, batch_size=BATCH, workers=workers)
    notes: list[str] = []
    loads = BatchLoader(reads, PLACES, workers=workers, warm_up=warm_up, tell=notes.append)
    with contextlib.closing(loads) as loader:
        return [loader.take(place) for place in PLACES], loader.figures | {"notes": notes}


class Pairs(Dataset[Any]):
    """(x, y) of a data set of three things, for a run that trains."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def read(self, index: int) -> bytes:
        return self.inner.read(index)

    def decode(self, index: int, data: bytes) -> Any:
        x, drawn, y = self.inner.decode(index, data)
        return torch.cat([x, drawn]), y

    def __getitem__(self, index: int) -> Any:
        return self.decode(index, self.read(index))


@pytest.mark.parametrize(("name", "workers"), [("next_use", 0), ("next_use", 2), ("gain", 0), ("lru", 2)])
def test_order_and_bytes_are_those_without_a_cache(path, name, workers):
    plain, _ = batches(Pairs(Readable()))
    with broker_thread(path, policy(name, 30 * 2 * PAGE)):
        found, told = batches(Pairs(Readable()), path, workers=workers)
    assert same_tree(found, plain)
    counts = told["cache"]
    assert counts["hits"] + counts["loads"] == len(PLACES) * BATCH
    assert counts["hits"] > 0 or name == "lru"
    assert counts["times"]["sample_io"] > 0
    assert told["notes"] == []


class Drawn(Drawing):
    """(x, y), of which every third one draws."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return sample["x"], sample["y"]


class Nothing(Drawing):
    """Draws, and then has no sample, as those do whose collate function leaves such out."""

    def __getitem__(self, index: int) -> Any:
        return torch.rand(1) if index % 2 else [torch.rand(1), None][1]


def test_a_sample_that_draws_is_never_kept_and_the_others_are(path):
    plain, _ = batches(Drawn())
    with broker_thread(path, policy("lru", 1000 * PAGE)):
        found, told = batches(Drawn(), path)
        data = penstock.cached(Nothing(), job="a", decoded=True, socket=path, shuffle=False)
        for _ in range(2):  # nothing is a sample, too
            assert [sample is None for sample in data.__getitems__(list(data.sampler))] == [True, False] * 30
    assert same_tree(found, plain)
    drawing = sum(index % 3 == 0 for index in range(NUMBER))
    assert told["cache"]["hits"] >= (EPOCHS - 1) * (NUMBER - drawing - BATCH)
    assert told["cache"]["loads"] >= EPOCHS * (drawing - BATCH)


OWN: dict[str, tuple[Any, Any]] = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda own: float(torch.rand((), generator=own))),
    "python": (lambda: random.Random(1), lambda own: own.random()),
    "numpy": (lambda: np.random.default_rng(1), lambda own: float(own.random())),
    "old numpy": (lambda: np.random.RandomState(1), lambda own: float(own.rand())),
}


class Noisy(Dataset[Any]):
    """Draws from a generator of its own, which depends on what it calls."""

    def __init__(self, kind: str) -> None:
        self.kind, self.transforms = kind, [{"noise": OWN[kind][0]()}]

    def __len__(self) -> int:
        return NUMBER

    def __getitem__(self, index: int) -> Any:
        return index + OWN[self.kind][1](self.transforms[0]["noise"]), index


@pytest.mark.parametrize("kind", list(OWN))
def test_a_sample_that_draws_from_a_generator_of_its_own_is_not_kept(path, kind):
    plain = Noisy(kind)
    with broker_thread(path, policy("lru", 1000 * PAGE)):
        data = penstock.cached(Noisy(kind), job="a", decoded=True, socket=path, epochs=2)
        for epoch in range(2):
            assert [data[index] for index in data.sampler] == [plain[index] for index in data.order(epoch)]
        assert data.through.counts.hits == 0
        data.through.cache.close()


class Written(Dataset[Any]):
    """Files, read as they are."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __len__(self) -> int:
        return 4

    def path(self, index: int) -> str:
        return str(self.root / f"{index}.bin")

    def read(self, index: int) -> bytes:
        return Path(self.path(index)).read_bytes()

    def decode(self, index: int, data: bytes) -> bytes:
        return data

    def __getitem__(self, index: int) -> bytes:
        return self.decode(index, self.read(index))


class Backwards(Written):
    """The same files, read otherwise."""

    def read(self, index: int) -> bytes:
        return super().read(index)[::-1]


def test_a_file_that_changes_is_read_anew(path, tmp_path):
    for index in range(4):
        (tmp_path / f"{index}.bin").write_bytes(bytes([index]) * 50)
    with broker_thread(path, policy("lru", 100 * PAGE)):
        data = penstock.cached(Written(tmp_path), job="a", socket=path, shuffle=False)

        def epoch() -> tuple[list[bytes], int]:
            """Bytes that an epoch reads, and its hits."""
            before = data.through.counts.hits
            return data.__getitems__(list(data.sampler)), data.through.counts.hits - before

        files = [bytes([index]) * 50 for index in range(4)]
        assert epoch() == (files, 0)
        assert epoch() == (files, 4)
        (tmp_path / "2.bin").write_bytes(b"anew" * 20)
        files[2] = b"anew" * 20
        assert epoch() == (files, 3)
        os.utime(tmp_path / "1.bin", ns=(1, 1))  # as long as before, and another time
        assert epoch() == (files, 3)
        assert epoch() == (files, 4)


def test_files_that_are_read_otherwise_are_other_samples(path, tmp_path):
    for index in range(4):
        (tmp_path / f"{index}.bin").write_bytes(bytes([index, 200]))
    jobs = []  # what a job had admitted leaves with it, so all stay
    with broker_thread(path, policy("lru", 100 * PAGE)):
        for dataset in (Written(tmp_path), Backwards(tmp_path), Written(tmp_path)):
            for one in (dataset, Subset(dataset, [0, 1, 2, 3])):
                jobs.append(penstock.cached(one, job=str(len(jobs)), socket=path, shuffle=False))
                assert jobs[-1].__getitems__(list(jobs[-1].sampler)) == [dataset[index] for index in range(4)]
    assert [data.through.counts.hits for data in jobs[::2]] == [0, 0, 4]


def test_folders_of_torchvision_keep_files_and_draw_their_transforms_anew(path, tmp_path):
    from torchvision import datasets, transforms

    draws = [transforms.RandomCrop(5), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    write_images(tmp_path, train=NUMBER // 2)
    whole = datasets.ImageFolder(str(tmp_path / "train"), transform=transforms.Compose(draws))
    plain, _ = batches(whole)
    with broker_thread(path, policy("lru", 1000 * PAGE)):
        found, told = batches(whole, path, workers=1)
        assert same_tree(found, plain)
        assert told["cache"]["hits"] >= (EPOCHS - 1) * (NUMBER - 2 * BATCH)
        part = Subset(whole, list(range(10, 30)))
        one = penstock.cached(part, job="b", socket=path, shuffle=False)
        list(one.sampler)
        torch.manual_seed(3)
        expected = [part[index] for index in range(20)]
        torch.manual_seed(3)
        assert same_tree(one.__getitems__(list(range(20))), expected)


@pytest.mark.parametrize(
    ("start", "persistent_workers"), [("fork", True), pytest.param("spawn", False, marks=pytest.mark.slow)]
)
def test_a_loader_of_torch_goes_through_it(path, start, persistent_workers):
    with broker_thread(path, policy("next_use", 40 * 2 * PAGE)):
        data = penstock.cached(Readable(), job="a", batch_size=BATCH, epochs=2, socket=path)
        options: Any = {"persistent_workers": persistent_workers, "multiprocessing_context": start}
        loads = DataLoader(data, batch_size=BATCH, sampler=data.sampler, num_workers=2, **options)
        for epoch in range(2):
            seen = [int(index) for _, _, indices in loads for index in indices]
            assert seen == list(data.order(epoch))
        assert data.order(0) != data.order(1)
        (job,) = state(path)["jobs"]
        assert job["epoch"] == 1
        assert 20 <= job["hits"] <= 40  # what lay there when the first epoch ended
        del loads
        data.through.cache.close()
        within(10, lambda: not state(path)["jobs"])


def test_what_cannot_be_cached_says_why():
    named: Any = {"job": "a"}
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (Stream(), named, "for samples with a number, found a Stream"),
        (Stream(), named | {"decoded": True}, "for samples with a number, found a Stream"),
        (Drawing(), named, r"a Drawing has no read\(index\).*decoded=True"),
        (Readable(), {"job": ""}, "a name of 1 to 200"),
        (Readable(), {"job": "x" * 5000}, "a name of 1 to 200"),
        (Readable(), named | {"batch_size": 0}, "batch_size=0 must be a whole number"),
        (Readable(), named | {"epochs": 0}, "epochs=0 must be a whole number"),
        (Subset(Readable(), []), named, "without samples"),
    ]
    for dataset, options, why in refused:
        with pytest.raises(ConfigError, match=why):
            penstock.cached(dataset, **options)


class Negated(Readable):
    """Another sample than ``decode`` of ``read`` gives."""

    def __getitem__(self, index: int) -> Any:
        return -super().__getitem__(index)[0]


class Around(Dataset[Any]):
    """Hands on what it has not, as many wrappers do."""

    def __init__(self) -> None:
        self.inner = Readable()

    def __len__(self) -> int:
        return NUMBER

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name) if "inner" in self.__dict__ else None

    def __getitem__(self, index: int) -> Any:
        return -self.inner[index][0]


@pytest.mark.parametrize("made", [Negated, Around, lambda: Subset(Around(), range(9))])
def test_what_lies_over_read_and_decode_is_not_passed_by(made):
    with pytest.raises(ConfigError, match=r"only whole samples could be kept"):
        sample_source(made(), decoded=False)
    source = sample_source(made(), decoded=True)
    data, sample = source.load(3)
    assert sample[0] == -3
    assert data is None  # it draws


def test_samples_are_counted_from_the_end_and_end_as_those_of_a_list(path):
    with broker_thread(path, policy("lru", 1000 * PAGE)):
        data = penstock.cached(Readable(), job="a", socket=path, shuffle=False)
        list(data.sampler)
        numbers: tuple[Any, ...] = (-1, NUMBER - 1, torch.tensor(3))
        assert [data[index][2] for index in numbers] == [NUMBER - 1, NUMBER - 1, 3]
        assert data.through.counts.hits == 1
        assert len(list(data)) == NUMBER  # type: ignore[call-overload]
        for beyond in (NUMBER, -NUMBER - 1, 1 << 40):
            with pytest.raises(IndexError):
                data[beyond]
        assert data.through.cache._link  # type: ignore[union-attr]


def test_a_data_set_that_grows_or_shrinks_is_read_and_told(path):
    class Grown(Readable):
        number = NUMBER

        def __len__(self) -> int:
            return self.number

        def decode(self, index: int, data: bytes) -> Any:
            return data

    with broker_thread(path, policy("lru", 1000 * PAGE)):
        inner = Grown()
        data = penstock.cached(inner, job="a", socket=path, epochs=4)
        inner.number = NUMBER // 2
        assert [data[index][0] for index in data.sampler] == list(data.order(0))
        inner.number = NUMBER + 5
        with pytest.warns(UserWarning, match="of 60 samples is asked for 65; it may not grow in a job"):
            assert [data[index][0] for index in data.sampler] == list(data.order(1))
        assert [data[index][0] for index in data.sampler] == list(data.order(2))


def test_data_of_unknown_name_is_shared_with_nobody(path):
    with broker_thread(path, policy("lru", 1000 * PAGE)):
        one = penstock.cached(Readable(1), job="a", socket=path, shuffle=False)
        other = penstock.cached(Readable(2), job="a", socket=path, shuffle=False)
        for data, salt in ((one, 1), (other, 2), (one, 1)):
            found = data.__getitems__(list(data.sampler))
            assert [int(x[1]) for x, _, _ in found] == [salt] * NUMBER
        named = [penstock.cached(Readable(3), job=j, data="named", socket=path, shuffle=False) for j in "bc"]
        for data in named:
            data.__getitems__(list(data.sampler))
        assert named[1].through.counts.hits == NUMBER


@pytest.fixture
def redis_url(tmp_path):
    pytest.importorskip("redis")
    if (server := shutil.which("redis-server") or shutil.which("valkey-server")) is None:
        pytest.skip("no Redis server is installed; install redis-server or valkey-server")
    port = free_port()
    options = f"--port {port} --bind 127.0.0.1 --appendonly no --dir {tmp_path}".split()
    process = subprocess.Popen([server, "--save", "", *options], stdout=subprocess.DEVNULL)
    try:
        within(20, lambda: _answers(port))
        yield f"redis://127.0.0.1:{port}/0", process
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as asks:
        return not asks.connect_ex(("127.0.0.1", port))


def test_a_server_of_redis_holds_samples_for_several_machines(redis_url):
    url, process = redis_url
    plain = [Readable()[index] for index in range(3)]
    jobs = [penstock.cached(Readable(), job=name, data="named", backend=url, shuffle=False) for name in "ab"]
    for data in jobs:
        list(data.sampler)
        torch.manual_seed(0)
        data.__getitems__([0, 1, 2])
    assert [data.through.counts.hits for data in jobs] == [0, 3]
    assert jobs[1].dataset.reads == []
    server: Any = jobs[0].through.cache
    key = f"{server._prefix}1"
    value = bytearray(server._server.get(key))
    value[-1] ^= 1
    server._server.set(key, bytes(value))
    jobs[1].__getitems__([0, 1, 2])
    assert jobs[1].dataset.reads == [1]  # its checksum does not hold
    server._server.set(key, b"x")
    assert jobs[0].through.cache.use([1]) == [None]
    process.kill()
    process.wait()
    with pytest.warns(UserWarning, match="goes on without the sample cache: redis://"):
        found = jobs[1].__getitems__([0, 1, 2])
    assert [x.tolist() for x, _, _ in found] == [x.tolist() for x, _, _ in plain]
    for data in jobs:
        data.through.cache.close()


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.stride() == b.stride() and same_bits(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Image.Image):
        return (a.mode, a.size, a.tobytes()) == (b.mode, b.size, b.tobytes())
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[name], b[name]) for name in a)
    return repr(a) == repr(b) if isinstance(a, float) else a == b  # of -0.0 and of no number, too


def tensor(dtype: torch.dtype, shape: tuple[int, ...], order: int) -> torch.Tensor:
    many = torch.arange(math.prod(shape)).view(shape).to(dtype)
    return [many, many.mT, many[::2], many.unsqueeze(0).expand(3, *many.shape)][order]


SHAPES = [(2, 3), (1, 1), (0, 2), (7, 5)]
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(),
    st.builds(tensor, st.sampled_from(DTYPES), st.sampled_from(SHAPES), st.integers(0, 3)),
    st.builds(lambda n, kind: np.arange(n, dtype=kind), st.integers(0, 9), st.sampled_from("bBhiqfdFD")),
    st.builds(lambda n: np.float32(n), st.floats(width=32)),
    st.builds(lambda mode: Image.new(mode, (3, 2), 1), st.sampled_from(["L", "RGB", "RGBA", "1", "F", "I"])),
)  # fmt: skip
SAMPLES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(st.text(max_size=4), inner)
    ),
    max_leaves=8,
)


@given(SAMPLES)
@example([-0.0, math.nan, math.inf, -math.inf, 5e-324, 2**70, True])
def test_what_comes_back_is_what_there_was(sample):
    data = to_bytes(sample)
    assert data is not None
    assert same(from_bytes(data), sample)


class Mine(torch.Tensor):
    pass


class Odd(dict[str, int]):
    pass


@pytest.mark.parametrize(
    "sample",
    [
        object(), {1, 2}, Odd(a=1), {1: 2}, torch.nn.Parameter(torch.ones(1)),
        torch.ones(1).as_subclass(Mine), torch.ones(2).requires_grad_(), torch.ones(2, 2).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, device="meta"),
        torch.arange(4.0).as_strided((2, 2), (1, 1)), np.array(["a"]),
        np.array([None]), np.ones((3, 3)).T[::2], np.ones(2, ">f4"), Image.new("P", (2, 2)),
        [torch.ones(1), object()], lambda: 1,
    ],
)  # fmt: skip
def test_what_may_come_back_otherwise_has_no_bytes(sample):
    assert to_bytes(sample) is None


@given(SAMPLES, st.data())
def test_damage_is_an_error_of_ours_and_never_another(sample, chosen):
    data = bytearray(to_bytes(sample) or b"")
    at = chosen.draw(st.integers(0, len(data) - 1))
    data[at] ^= 1 << chosen.draw(st.integers(0, 7))
    for damaged in (bytes(data), bytes(data[:at])):
        try:
            from_bytes(damaged)
        except PenstockError:
            pass
