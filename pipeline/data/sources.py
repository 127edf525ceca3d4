"""Places of the data sets' files: found, or refused with how to get them, before torch is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...compression.errors import ConfigError

DEBIAN_ROOT = "/usr/share/datasets/fashion-mnist"
TEST_FOLDERS = ("val", "test")

_NAMES = [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


def check(options: Mapping[str, Any]) -> None:
    """Refuse the options of a data set of ours whose files are not there.

    Raises: ConfigError: it names the option, and says what its folder must hold.
    """
    find, option = _FINDS.get(str(options.get("_target_")), (None, ""))
    if find is not None and option in options:
        find(options[option])


def fashion_mnist(root: object) -> Path:
    """Return where the four files lie: as torchvision lays them out, or in ``root`` itself."""
    folders = [Path(str(root), "FashionMNIST", "raw"), Path(str(root))]
    for folder in folders:
        if all(plain_or_gzipped(folder, name).is_file() for name in _NAMES):
            return folder
    raise ConfigError(
        f"data.root={root} has no Fashion-MNIST files (looked in {folders[0]} and {folders[1]}); "
        f"get them by `apt install dataset-fashion-mnist` for data.root={DEBIAN_ROOT}, or in Python by "
        "`torchvision.datasets.FashionMNIST('data', download=True)` for data.root=data"
    )


def plain_or_gzipped(folder: Path, name: str) -> Path:
    """The file of that name in ``folder``, or the gzipped one."""
    plain = folder / name
    return plain if plain.is_file() else folder / f"{name}.gz"


def image_folder(root: object) -> tuple[Path, Path]:
    """Return the folders of the train and of the test split."""
    folder = Path(str(root))
    names = [name for name in TEST_FOLDERS if (folder / name).is_dir()]
    splits = folder / "train", folder / (names or TEST_FOLDERS)[0]
    for split in splits:
        if not split.is_dir():
            raise no_images(root, split, "there is no such folder")
    return splits


def no_images(root: object, folder: Path, reason: str) -> ConfigError:
    """Return the refusal of an image folder that is none."""
    return ConfigError(
        f"data.root={root} must hold train/CLASS/*.png and val/CLASS/*.png (or test/), jpg and others as "
        f"well; {folder} has none: {reason}"
    )


def text(path: object) -> Path:
    """Return the file of a text; of None, Python's help topics, found without importing them."""
    if path is None:
        return _help_topics()
    file = Path(str(path))
    try:
        with file.open("rb"):
            return file
    except OSError as error:
        raise ConfigError(f"data.path={file} cannot be read ({error.strerror}); name a UTF-8 file") from error


def _help_topics() -> Path:
    spec = importlib.util.find_spec("pydoc_data")
    file = Path(*(spec.submodule_search_locations or [""])[:1], "topics.py") if spec else None
    if file is None or not file.is_file():
        raise ConfigError("this Python comes without pydoc_data/topics.py; name a UTF-8 file with data.path=")
    return file


_FINDS: dict[str, tuple[Callable[[object], object], str]] = {
    "penstock.pipeline.data.fashion_mnist.load": (fashion_mnist, "root"),
    "penstock.pipeline.data.image_folder.load": (image_folder, "root"),
    "penstock.pipeline.data.text.load": (text, "path"),
}
