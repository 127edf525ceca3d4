"""Start of every test: one thread, deterministic algorithms, the same seed."""

import gc
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks, give_back_memory

pytest_plugins = ["sampling"]

# A job in the background and nohup leave these ignored, to children too: tests of them waited for ever.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    beside = Path(__file__).resolve().parents[2] / "shared" / "corpora"
    parser.addoption("--corpora", type=Path, default=beside, help="folder with graphs of PipeDream")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test that takes ranks from the pool."""
    if isinstance(item, pytest.Function) and "ranks" in item.fixturenames:
        if not hasattr(item, "callspec") or "ranks" not in item.callspec.params:  # a number of ranks
            item.add_marker("ranks")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Have the collector pass over what is here by now, which is torch above all."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_start() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def memory_goes_back() -> Iterator[None]:
    """Several workers and their ranks share a machine."""
    yield
    give_back_memory()


@pytest.fixture
def corpora(request: pytest.FixtureRequest) -> Path:
    """The folder of ``--corpora``."""
    folder: Any = request.config.getoption("--corpora")
    if not folder.is_dir():
        pytest.skip(f"no folder {folder}; --corpora=PATH names another")
    return folder


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system of its own can be mounted by root only, and not in every container")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """One pool of spawned processes for the whole run."""
    pool = Ranks()
    yield pool
    pool.close()
