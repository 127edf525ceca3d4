"""One storage for all ranks, or local copies of it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import ConfigError, in_threads
from penstock.pipeline.data.storage import check_shared, listing, local_copy


def said(places: list[Path]) -> list[str]:
    """Message of each rank whose files are at its place."""

    def run(world: Any) -> str:
        try:
            check_shared({"root": str(places[world.rank])}, rank=world.rank, gather=world.all_gather_json)
        except ConfigError as error:
            return str(error)
        return ""

    return in_threads(run, ranks=len(places))


@pytest.fixture
def images(tmp_path):
    for name in ("train/cats/1.png", "train/dogs/2.png"):
        file = tmp_path / "images" / name
        file.parent.mkdir(parents=True)
        file.write_bytes(name.encode())
    return tmp_path / "images"


def test_what_rank_0_writes_all_must_read_and_nothing_stays(images, tmp_path):
    before = listing(images)
    assert said([images] * 3) == ["", "", ""]
    other = tmp_path / "other"
    other.mkdir()
    for place in (other, tmp_path / "nowhere"):
        told = said([images, images, place])
        assert all("is not the same storage for all ranks: rank 2 does not find" in one for one in told)
        assert all("data.local=PATH" in one for one in told)
    assert listing(images) == before
    assert not [name for name in os.listdir(images) if name.startswith(".")]


def test_where_nobody_may_write_names_and_sizes_agree(images, tmp_path, monkeypatch):
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "touch", refused)
    copy = Path(local_copy({"root": str(images)}, str(tmp_path / "copies"))["root"])
    assert said([images, copy]) == ["", ""]
    (copy / "train/dogs/3.png").write_bytes(b"more")
    assert all("rank 1 does not find" in one for one in said([images, copy]))


def test_a_local_copy_is_made_once_and_anew_when_the_files_change(images, tmp_path):
    options = {"root": str(images), "size": 8}
    local = str(tmp_path / "deep" / "local")
    first = local_copy(options, local)
    copy = Path(first["root"])
    assert first["size"] == 8
    assert (copy / "train/cats/1.png").read_bytes() == b"train/cats/1.png"
    assert listing(copy) == listing(images)
    made = copy.stat().st_mtime_ns
    assert local_copy(options, local) == first
    assert copy.stat().st_mtime_ns == made
    (images / "train/cats/1.png").write_bytes(b"other")
    second = Path(local_copy(options, local)["root"])
    assert second != copy
    assert (second / "train/cats/1.png").read_bytes() == b"other"
    assert {name for name in os.listdir(local) if name.startswith(".")} == {".penstock_lock"}


def test_a_file_is_copied_too_and_what_cannot_be_is_refused(images, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("penstock")
    found = local_copy({"path": str(text)}, str(tmp_path / "local"))
    assert Path(found["path"]).read_text() == "penstock"
    for options in ({"size": 8}, {"root": "/nowhere"}):
        with pytest.raises(ConfigError, match="and there is none"):
            local_copy(options, str(tmp_path))
    with pytest.raises(ConfigError, match=r"data.local=.*text.txt/local: .* cannot be copied there"):
        local_copy({"root": str(images)}, str(text / "local"))


def test_what_is_mounted_to_be_read_only_is_read(images):
    mounted = f"mount --bind {images} {images} && mount -o remount,bind,ro {images} && cd {images}"
    look = f"""
from penstock.pipeline.data.storage import check_shared
for options in ({{"root": "{images}"}}, {{}}):
    check_shared(options, rank=0, gather=lambda item: [item, item])
"""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mounted} && exec "$0" -c "$1"', sys.executable, look],
        capture_output=True,
        text=True,
    )
    if "not permitted" in done.stderr:
        pytest.skip("mounting needs root")
    assert done.returncode == 0, done.stderr
