"""The file of a rank: it has no name, takes no cache where that can be had, and says who refuses it."""

import errno
import mmap
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.compression.errors import ConfigError, StageError
from penstock.stages.memory import slab as slab_module
from penstock.stages.memory.extents import UNIT
from penstock.stages.memory.slab import Slab, worded


def pages(content):
    own = mmap.mmap(-1, UNIT)
    own[:] = content * (UNIT // len(content))
    return memoryview(own)


def cannot_reserve(patch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    patch.setattr(os, "posix_fallocate", refuse)


@pytest.mark.parametrize(
    "lacks",
    [
        lambda patch: None,
        lambda patch: patch.setattr(slab_module, "_UNNAMED", 0),  # so its name is taken away at once
        cannot_reserve,
    ],
    ids=["nothing", "files without a name", "reserving"],
)
def test_nothing_is_seen_in_the_folder_and_bytes_come_back_whatever_a_file_system_lacks(
    lacks, tmp_path, monkeypatch
):
    lacks(monkeypatch)
    slab = Slab(tmp_path)
    assert slab.grow(0, 2 * UNIT)
    assert list(tmp_path.iterdir()) == []
    slab.write_all(pages(b"penstock"), UNIT)
    found = pages(b"-")
    slab.read_all(found, UNIT)
    assert bytes(found) == b"penstock" * (UNIT // 8)
    slab.close()


def test_a_file_system_that_has_no_way_past_the_cache_is_written_through_it(tmp_path, monkeypatch):
    opened = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    slab = Slab(tmp_path)
    assert not slab.direct
    assert slab.grow(0, UNIT)
    slab.write_all(memoryview(b"short"), 3)  # no page, no unit
    found = memoryview(bytearray(5))
    slab.read_all(found, 3)
    assert bytes(found) == b"short"
    slab.close()


def test_space_that_is_not_there_is_refused_and_none_is_kept(small_disk):
    slab = Slab(small_disk)
    assert slab.grow(0, 128 << 10)
    free = os.statvfs(small_disk).f_bfree
    assert not slab.grow(128 << 10, 1 << 20)
    assert os.statvfs(small_disk).f_bfree == free
    slab.close()


def test_a_folder_that_takes_no_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    for folder, found in ((tmp_path / "nowhere", "nowhere"), (tmp_path / "file", "file")):
        with pytest.raises(ConfigError, match=f"found .*/{found} .Not a directory.*memory.path="):
            Slab(folder)


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_nothing(tmp_path):
    program = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from penstock.stages.memory.disk import Disk\nfrom penstock.stages.memory.room import DiskOptions\n"
        "from penstock.compression.pool import Frame, Pool\n"
        "disk, pool = Disk(DiskOptions(path=sys.argv[1])), Pool()\n"
        "disk.write(Frame(pool.take(5_000_000), 5_000_000, pool))\n"
        "disk.drain()\nassert disk.bytes_written >= 5_000_000\n"
        "assert list(Path(sys.argv[1]).iterdir()) == []\n"  # no name: the system frees it with the process
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=120, check=False)
    assert done.returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_what_a_system_refuses_is_one_sentence_with_the_frame_the_folder_and_the_remedy():
    full = worded(OSError(errno.ENOSPC, "No space"), "5 bytes could not be written to", Path("/d"))
    assert isinstance(full, StageError)
    assert re.search(
        "5 bytes could not be written to .* /d, found No space.*memory.disk=.*memory.path=", str(full)
    )
    error = ValueError("ours")
    assert worded(error, "", Path("/d")) is error
