"""The slow store of benches: the same bytes for all, never sooner than its rate grants, and a clean end."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import struct
import time

import pytest
import torch

from penstock.compression.errors import TransportError
from penstock.pipeline.samples.cache import place
from penstock.pipeline.samples.cache.storage import TokenBucket
from penstock.scripts.bench import slow_store
from penstock.scripts.bench.slow_store import MadeUp, Reader, samples, serving

pytestmark = pytest.mark.slow  # what it tests is a tool of maintainers

FILES = MadeUp(num_samples=30, num_bytes=2_000)


@pytest.fixture
def store(tmp_path):
    with serving(tmp_path / "store", FILES, TokenBucket()) as path:
        yield path


def test_samples_are_the_bytes_of_their_number_and_no_others(store):
    data = samples(address=str(store))
    assert len(data) == 30
    assert [data.read(index) for index in (3, 29, 3)] == [FILES.read(index) for index in (3, 29, 3)]
    assert len({FILES.read(index) for index in range(30)}) == 30
    assert {len(FILES.read(index)) for index in range(30)} == {2_000}
    part = samples(address=str(store), first=25, number=10)
    assert len(part) == 5
    assert part.read(4) == FILES.read(29)


def test_a_sample_is_an_image_of_which_the_class_can_be_seen(store):
    data = samples(address=str(store))
    for index in (0, 7, 19):
        image, label = data[index]
        assert label == index % 10
        assert (image.shape, image.dtype) == ((3, 16, 16), torch.float32)
        stripes = image.flatten()[:760].view(-1, 10).mean(0)
        assert int(stripes.argmax()) == label
    assert data.classes == [str(number) for number in range(10)]


def test_the_files_of_a_folder_are_served_by_their_names(tmp_path):
    (tmp_path / "files" / "b").mkdir(parents=True)
    (tmp_path / "files" / "a.bin").write_bytes(b"first")
    (tmp_path / "files" / "b" / "c.bin").write_bytes(b"")
    listed = slow_store.folder(tmp_path / "files")
    with serving(tmp_path / "store", listed, TokenBucket()) as path:
        reader = Reader(path)
        assert (reader.num_samples, reader.read(0), reader.read(1)) == (2, b"first", b"")
        (tmp_path / "files" / "a.bin").unlink()
        with pytest.raises(TransportError, match="has no sample 0"):
            reader.read(0)
        assert reader.read(1) == b""  # the connection goes on
        reader.close()


def test_numbers_of_no_sample_are_refused_and_half_a_question_harms_nobody(store):
    reader = Reader(store)
    with pytest.raises(TransportError, match="has no sample 30"):
        reader.read(30)
    half = place.connect(store, 5)
    half.sendall(struct.pack("<I", 1)[:3])
    half.close()
    assert reader.read(29) == FILES.read(29)
    reader.close()


def test_all_readers_share_the_rate_and_each_read_has_the_latency(tmp_path):
    # Least times alone: what a busy machine adds is no matter.
    with serving(tmp_path / "store", FILES, TokenBucket(40_000, latency=0.05)) as path:
        readers = [Reader(path), Reader(path)]
        began = time.monotonic()
        for index in range(5):
            for reader in readers:
                assert reader.read(index) == FILES.read(index)
        assert time.monotonic() - began >= 10 * 0.05
    with serving(tmp_path / "store", FILES, TokenBucket(40_000)) as path:
        began = time.monotonic()
        context = multiprocessing.get_context("fork")
        others = [context.Process(target=_five, args=(path,)) for _ in range(2)]
        for other in others:
            other.start()
        for other in others:
            other.join()
        assert [other.exitcode for other in others] == [0, 0]
        assert time.monotonic() - began >= 10 * 2_000 / 40_000


def _five(path):
    data = samples(address=str(path))
    for index in range(5):
        assert data.read(index) == FILES.read(index)


def test_a_forked_or_pickled_copy_has_a_connection_of_its_own(store):
    data = samples(address=str(store))
    data.read(0)
    copy = pickle.loads(pickle.dumps(data))
    assert copy.read(1) == FILES.read(1)
    child = os.fork()
    if not child:
        os._exit(data.read(2) != FILES.read(2))
    for _ in range(20):
        assert data.read(3) == FILES.read(3)
    assert os.waitpid(child, 0)[1] == 0


def test_nothing_is_left_behind_and_who_still_reads_is_told(tmp_path):
    with serving(tmp_path / "store", FILES, TokenBucket()) as path:
        reader = Reader(path)
        assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TransportError, match="is gone"):
        reader.read(0)
    reader.close()
    with pytest.raises(TransportError, match="no slow store answers"):
        samples(address=str(path))


def test_a_store_that_cannot_begin_says_so(tmp_path):
    (tmp_path / "store").write_bytes(b"")
    with (
        pytest.raises(TransportError, match="slow store did not begin"),
        serving(tmp_path / "store", FILES, TokenBucket()),
    ):
        pass
    assert (tmp_path / "store").read_bytes() == b""  # what was there is left alone
