"""The checkout: its files, copies of it, and programs that run in it or elsewhere."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ON_RANKS = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def files() -> list[Path]:
    """Return the checkout's files, relative to it: what git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return sorted(Path(name) for name in set(listed.stdout.split("\0")) if name and (ROOT / name).is_file())


def copy_to(folder: Path) -> Path:
    for file in files():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, folder / file)
    return folder


def run(*words: str, cwd: Path = ROOT, seconds: float = 300, **surroundings: str) -> str:
    """Return what Python prints, started with these words, which must end well."""
    usual = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    how = {"cwd": cwd, "env": usual | surroundings, "timeout": seconds}
    done = subprocess.run([sys.executable, *words], **how, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_script(*words: str, cwd: Path) -> str:
    """Run a script on one thread a process, which finds the modules that this one does."""
    paths = os.pathsep.join(filter(None, sys.path))
    return run(*words, cwd=cwd, seconds=400, OMP_NUM_THREADS="1", PYTHONPATH=paths)
