"""From a fresh clone by one command: a quiet install, a run of a screen, and a failure that can be read."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from checkout import copy_to

pytestmark = pytest.mark.ranks
SMALL = "model=mlp model.hidden=[8] data.size=8 epochs=4"


def in_clone(folder: Path, line: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")
    }
    return subprocess.run(
        ["sh", "-c", line], cwd=folder, env=environment | {"PYTHON": sys.executable} | more,
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A checkout whose environment finds here what would have to be downloaded."""
    folder = copy_to(tmp_path / "clone")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    (site,) = (folder / ".venv" / "lib").glob("python*/site-packages")
    here = dict.fromkeys(path for path in sys.path if path.endswith("site-packages"))
    (site / "shared.pth").write_text("\n".join([*here, sysconfig.get_path("purelib")]))
    return folder


def test_the_quickstart_is_a_screen(clone):
    done = in_clone(clone, f"./scripts/quickstart {SMALL}", PIP_NO_INDEX="1")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("Installing into .venv: this downloads PyTorch")
    assert len(said) <= 25
    assert sum("test accuracy" in line for line in said) == 5
    assert "Successfully installed penstock" in (clone / ".venv" / "install.log").read_text()
    again = in_clone(clone, "./scripts/quickstart --help", PIP_NO_INDEX="1")
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("penstock train ")
    assert in_clone(clone, ". .venv/bin/activate && penstock --version").stdout.startswith("penstock ")


@pytest.mark.slow
def test_an_install_that_fails_shows_what_pip_said(clone):
    setup = clone / "setup.cfg"
    setup.write_text(setup.read_text().replace("    lz4>=4\n", "    lz4>=4\n    no-such-thing-anywhere\n"))
    done = in_clone(clone, f"./scripts/quickstart {SMALL}", PIP_NO_INDEX="1")
    assert done.returncode == 1
    assert "no-such-thing-anywhere" in done.stderr
    assert len(done.stderr.splitlines()) <= 21
    assert f"all that pip said is in {clone}/.venv/install.log" in done.stderr
    assert "loss" not in done.stdout
