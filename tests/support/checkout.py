"""The checkout: its files, and copies of it."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
