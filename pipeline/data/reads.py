"""Conversion of a data set's samples to bytes for the sample cache, and back to exactly the same samples."""

from __future__ import annotations

import hashlib
import io
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch.utils.data import IterableDataset, Subset

from ...compression.errors import ConfigError
from .cache.sample_bytes import from_bytes, to_bytes
from .drawn import generators, own_generators

_STAMP = struct.Struct("<qq")  # bytes and nanoseconds of a file


class Reads(Protocol):
    """Reader of samples as bytes, and decoder of bytes.

    Attributes: data: names the bytes, for jobs that may share them; "" where it cannot be determined."""

    data: str

    def load(self, index: int) -> tuple[bytes | None, Any]:
        """Return the bytes of a sample, None if they are not to be kept, and the sample where it is there."""
        ...

    def decode(self, index: int, data: bytes) -> Any:
        """Return the sample of these bytes."""
        ...

    def stamp(self, index: int) -> bytes:
        """Return what changes where the sample does; nothing where nobody can tell."""
        ...


class Files:
    """Reads of a data set with ``read(index)``, ``decode(index, data)`` and, where it has files, ``path``.

    What reads the files is part of their name: another may make other bytes of them."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.data = ""
        if hasattr(dataset, "path"):
            names = hashlib.blake2b(_reader(dataset).encode(errors="surrogateescape"), digest_size=16)
            for index in range(len(dataset)):
                names.update(f"{os.path.abspath(dataset.path(index))}\0".encode(errors="surrogateescape"))
            self.data = f"files {names.hexdigest()}"

    def load(self, index: int) -> tuple[bytes | None, Any]:
        """Return the bytes of a file; they are decoded by whoever asks."""
        return self._dataset.read(index), None

    def decode(self, index: int, data: bytes) -> Any:
        """Return the sample."""
        return self._dataset.decode(index, data)

    def stamp(self, index: int) -> bytes:
        """Return size and time of the file; nothing where it has none."""
        if not self.data:
            return b""
        try:
            found = os.stat(self._dataset.path(index))
        except OSError:
            return b""
        return _STAMP.pack(found.st_size, found.st_mtime_ns)


class Folder:
    """``read`` and ``decode`` of torchvision's folders of images, with their own loader and transforms."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def path(self, index: int) -> str:
        """Return the file of an image."""
        return self._dataset.samples[index][0]

    def read(self, index: int) -> bytes:
        """Return the bytes of the file."""
        return Path(self.path(index)).read_bytes()

    def decode(self, index: int, data: bytes) -> Any:
        """Return (image, class), transformed."""
        from PIL import Image

        whole, (_, target) = self._dataset, self._dataset.samples[index]
        sample = Image.open(io.BytesIO(data)).convert("RGB")  # as torchvision's own loader does of a path
        if whole.transform is not None:
            sample = whole.transform(sample)
        return sample, target if whole.target_transform is None else whole.target_transform(target)


class Part:
    """``read`` and ``decode`` of a ``Subset``."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self.whole, self._indices = dataset, indices
        if hasattr(dataset, "path"):
            self.path: Callable[[int], str] = self._path

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int) -> bytes:
        """Return the bytes of a sample."""
        return self.whole.read(self._indices[index])

    def decode(self, index: int, data: bytes) -> Any:
        """Return the sample of these bytes."""
        return self.whole.decode(self._indices[index], data)

    def _path(self, index: int) -> str:
        return self.whole.path(self._indices[index])


class Whole:
    """Reads of a data set that only has samples, which are kept as they are."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.data = dataset, ""

    def load(self, index: int) -> tuple[bytes | None, Any]:
        """Return a sample; its bytes only if nothing was drawn and they are sure to come back the same."""
        own = own_generators(self._dataset)
        before = generators(own)
        sample = self._dataset[index]
        drawn = before != generators(own)
        return None if drawn else to_bytes(sample), sample

    def decode(self, index: int, data: bytes) -> Any:
        """Return the sample of these bytes."""
        return from_bytes(data)

    def stamp(self, index: int) -> bytes:
        """Nobody can tell."""
        return b""


def reads_of(dataset: Any, *, decoded: bool) -> Reads:
    """Return how a data set is read.

    Args:    decoded: keep whole samples where it does not tell how it reads and decodes them.
    Raises:  ConfigError: it does not, and that was not asked for."""
    if (files := _files_of(dataset)) is not None:
        return Files(files)
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):  # torch gives an iterable one a __getitem__ that raises
        raise ConfigError(
            f"the sample cache is for samples with a number, found a {type(dataset).__name__}, which has an "
            "order of its own only; leave cache= out"
        )
    if not decoded:
        raise ConfigError(
            f"a {type(dataset).__name__} has no read(index) -> bytes and decode(index, bytes), so only whole "
            "samples could be kept; if a number always gives the same sample, say so by cache.decoded=true "
            "(penstock.cached(..., decoded=True))"
        )
    return Whole(dataset)


def _files_of(dataset: Any) -> Any:
    """Object with ``read`` and ``decode``: a data set itself, or an adapter of it."""
    if _tells(dataset):
        return dataset
    if type(dataset) is Subset:
        inner = _files_of(dataset.dataset)
        return None if inner is None else Part(inner, dataset.indices)
    kinds = type(dataset).__mro__
    folder = next((one for one in kinds if one.__module__ == "torchvision.datasets.folder"), None)
    if folder is not None and hasattr(dataset, "loader"):
        plain = type(dataset).__getitem__ is folder.__getitem__
        if plain and getattr(dataset.loader, "__module__", "") == folder.__module__ and _by_pillow():
            return Folder(dataset)
    return None


def _reader(dataset: Any) -> str:
    """Name and place of the function that reads the files of a data set."""
    while isinstance(dataset, Part):
        dataset = dataset.whole
    read = type(dataset).read
    code = getattr(read, "__code__", None)
    return f"{code.co_filename if code else read.__module__}:{read.__qualname__}\0"


def _tells(dataset: Any) -> bool:
    """True if ``read`` and ``decode`` give its samples.

    They do not where something overrides them: a ``__getitem__`` further down than both, or a wrapper that
    only passes on attributes that it lacks."""
    kinds = type(dataset).__mro__
    places = [
        next((place for place, kind in enumerate(kinds) if name in vars(kind)), len(kinds))
        for name in ("read", "decode", "__getitem__")
    ]
    return max(places[:2]) < len(kinds) and min(places[:2]) <= places[2]


def _by_pillow() -> bool:
    from torchvision import get_image_backend

    return get_image_backend() == "PIL"
