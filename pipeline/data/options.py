"""Refuse an option's value, anything that a user typed, in one sentence that says what would do."""

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...compression.errors import ConfigError

MOST_PIXELS = 1 << 26


def check_count(least: int = 1, /, **values: object) -> None:
    """Refuse values that are not whole numbers of at least so much; ``__`` in a name stands for the dot."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name.replace('__', '.')}={value} must be a whole number of at least {least}")


def check_image(*, size: object, channels: object = 1) -> None:
    """Refuse an image that is not (channels, size, size) of whole numbers, or too large for any memory."""
    check_count(data__size=size, data__channels=channels)
    assert isinstance(size, int)
    assert isinstance(channels, int)
    if channels * size * size > MOST_PIXELS:
        found = f"data.size={size} data.channels={channels}"
        raise ConfigError(f"{found} makes an image of more than {MOST_PIXELS:,} numbers; take a smaller one")


def check_known(option: str, value: object, known: Iterable[object]) -> None:
    """Refuse a value that is not among the known ones."""
    if value not in (names := list(known)):
        raise ConfigError(f"{option}={value} is not known; known are {', '.join(map(str, names))}")


DEBIAN_ROOT = "/usr/share/datasets/fashion-mnist"
TEST_FOLDERS = ("val", "test")

_NAMES = [f"{split}-{kind}-ubyte" for split in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]


def check_files(options: Mapping[str, Any]) -> None:
    """Refuse the options of a data set of ours whose files are not there; says what its folder must hold."""
    find, option = _FINDS.get(str(options.get("_target_")), (None, ""))
    if find is not None and option in options:
        find(options[option])


def find_fashion_mnist(root: object) -> Path:
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


def find_image_folder(root: object) -> tuple[Path, Path]:
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


def find_text(path: object) -> Path:
    """Return the file of a text; of None, Python's help topics, found without importing them."""
    if path is None:
        spec = importlib.util.find_spec("pydoc_data")
        file = Path(*(spec.submodule_search_locations or [""])[:1], "topics.py") if spec else None
        if file is None or not file.is_file():
            raise ConfigError(
                "this Python comes without pydoc_data/topics.py; name a UTF-8 file with data.path="
            )
        return file
    file = Path(str(path))
    try:
        with file.open("rb"):
            return file
    except OSError as error:
        raise ConfigError(f"data.path={file} cannot be read ({error.strerror}); name a UTF-8 file") from error


_FINDS: dict[str, tuple[Callable[[object], object], str]] = {
    "penstock.pipeline.data.fashion_mnist.load": (find_fashion_mnist, "root"),
    "penstock.pipeline.data.image_folder.load": (find_image_folder, "root"),
    "penstock.pipeline.data.text.load": (find_text, "path"),
}
