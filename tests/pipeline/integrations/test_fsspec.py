"""Files of fsspec through a broker: the same bytes, read from storage less often."""

import io
import os
import subprocess
import sys
import tarfile
import threading
from typing import Any

import fsspec
import numpy
import pytest
from brokers import broker_thread
from fsspec.implementations.memory import MemoryFileSystem

from penstock import ConfigError
from penstock.pipeline.data.cache.next_use import NextUse
from penstock.pipeline.data.cache.policies import Lru
from penstock.pipeline.integrations.fsspec import PenstockFileSystem

BLOCK = 1 << 12


class Counted(MemoryFileSystem):
    """A storage that counts what is read of it."""

    cachable = False
    reads: list[tuple[Any, Any]] = []  # noqa: RUF012 (one storage for all)

    def cat_file(self, path, start=None, end=None, **options):
        self.reads.append((path, start))
        return super().cat_file(path, start=start, end=end, **options)


@pytest.fixture
def storage():
    fs = Counted()
    fs.store.clear()
    fs.reads.clear()
    yield fs
    fs.store.clear()


def through(storage, socket):
    return PenstockFileSystem(fs=storage, socket=socket, block_size=BLOCK, skip_instance_cache=True)


def content(size, seed=0):
    return numpy.random.default_rng(seed).bytes(size)


@pytest.mark.parametrize("policy", [Lru, NextUse])
@pytest.mark.parametrize("size", [1, BLOCK, 5 * BLOCK + 17])
def test_a_file_is_read_once_for_all_who_open_it(size, policy, storage, tmp_path):
    data = content(size)
    storage.pipe("/set/part", data)
    with broker_thread(tmp_path / "socket", policy(1 << 20)):
        first, second = (through(storage, tmp_path / "socket") for _ in range(2))
        for fs in (first, second, first):
            assert fs.cat_file("/set/part") == data
            assert fs.ls("/set", detail=False) == ["/set/part"]
        assert storage.reads == [("/set/part", start) for start in range(0, size, BLOCK)]
        with first.open("/set/part") as file:  # any part, in any order
            for start in (size - 1, size // 2, 0, size // 3):
                file.seek(start)
                assert file.read(BLOCK + 3) == data[start : start + BLOCK + 3]
        assert len(storage.reads) == -(-size // BLOCK)


@pytest.mark.parametrize("longer", [0, 1])
def test_a_file_that_changed_is_read_anew(longer, storage, tmp_path):
    storage.pipe("/part", content(3 * BLOCK))
    with broker_thread(tmp_path / "socket", Lru(1 << 20)):
        fs = through(storage, tmp_path / "socket")
        fs.cat_file("/part")
        other = content(3 * BLOCK + longer, seed=1)
        storage.pipe("/part", other)
        for _ in range(2):
            assert fs.cat_file("/part") == other
        assert len(storage.reads) == 3 + 3 + longer


def test_more_files_than_connections_and_none_of_a_broker(storage, tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.pipeline.integrations.fsspec.MOST_FILES", 2)
    parts = {f"/{number}": content(2 * BLOCK, number) for number in range(5)}
    storage.pipe(parts)
    with broker_thread(tmp_path / "socket", Lru(1 << 20)):
        fs = through(storage, tmp_path / "socket")
        for _ in range(2):
            assert fs.cat(list(parts)) == parts
        assert 10 < len(storage.reads) <= 20  # the blocks of a file go with its connection
        errors = []

        def read(number):
            try:
                for turn in range(20):
                    path = f"/{(number + turn) % 5}"
                    assert fs.cat_file(path) == parts[path]
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
    alone = through(storage, tmp_path / "nobody")
    with pytest.warns(UserWarning, match="goes on without the sample cache: .*nobody has no broker"):
        assert alone.cat_file("/3") == parts["/3"]
    storage.pipe("/empty", b"")
    assert alone.cat_file("/empty") == b""
    with pytest.raises(ConfigError, match="files are read, found mode wb"):
        alone.open("/3", "wb")
    with pytest.raises(FileNotFoundError):
        alone.open("/none")


def test_a_member_of_another_archive_is_another_file(tmp_path):
    with broker_thread(tmp_path / "socket", Lru(1 << 20)):
        for letter in ("a", "b"):
            (tmp_path / "member").write_bytes(letter.encode() * 3)
            os.utime(tmp_path / "member", (0, 0))
            with tarfile.open(tmp_path / f"{letter}.tar", "w") as archive:
                archive.add(tmp_path / "member", "member")
        for letter in ("a", "b", "a"):
            fs = through(fsspec.filesystem("tar", fo=str(tmp_path / f"{letter}.tar")), tmp_path / "socket")
            assert fs.cat_file("member") == letter.encode() * 3


def test_file_systems_without_a_name_share_nothing(tmp_path):
    class Nameless(Counted):
        def __init__(self, content):
            super().__init__(content=content)
            self.content = content  # a file object, which is no JSON

        def info(self, path, **options):
            return {"name": path, "size": 3, "type": "file"}

        def cat_file(self, path, start=None, end=None, **options):
            return self.content.getvalue()[start:end]

    one = Nameless(io.BytesIO(b"aaa"))
    with broker_thread(tmp_path / "socket", Lru(1 << 20)):
        first = through(one, tmp_path / "socket")
        assert first.cat_file("/member") == b"aaa"
        one.content = io.BytesIO(b"bbb")  # as of another one that has its place in memory
        assert through(one, tmp_path / "socket").cat_file("/member") == b"bbb"


READER = """
import fsspec, sys
with fsspec.open("penstock::file://" + sys.argv[1], penstock={"socket": sys.argv[2]}) as file:
    print(sum(file.read()))
"""


def test_a_url_is_enough_in_another_process_and_for_parquet(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "part").write_bytes(content(1 << 16))
    with broker_thread(tmp_path / "socket", Lru(1 << 22)):
        command = [sys.executable, "-c", READER, str(tmp_path / "part"), str(tmp_path / "socket")]
        for _ in range(2):
            shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
            assert int(shown.stdout) == sum(content(1 << 16))
        numbers = datasets.Dataset.from_dict({"number": list(range(1000))})
        numbers.to_parquet(tmp_path / "numbers.parquet")
        url = f"penstock::file://{tmp_path}/numbers.parquet"
        with fsspec.open(url, penstock={"socket": str(tmp_path / "socket")}) as file:
            assert parquet.read_table(file).column("number").to_pylist() == list(range(1000))
        options = {"socket": str(tmp_path / "socket")}
        found = datasets.load_dataset(
            "parquet", data_files=f"penstock://{tmp_path}/numbers.parquet", split="train", streaming=True,
            storage_options=options,
        )  # fmt: skip
        for _ in range(2):
            assert [row["number"] for row in found] == list(range(1000))
