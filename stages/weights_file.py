"""The weights of a model in safetensors files, as people bring them: read tensor by tensor, each into memory
that is there already.

The library maps a file, so that all that was looked at counts as memory of the process; here no byte is read
that is not asked for, and none is held twice. What a file says of itself is checked before it is believed."""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..compression.errors import ConfigError
from .device import CPU
from .files import open_regular, reason
from .tensor_file import checksum, dtype_named

LONGEST_HEADER = 100_000_000  # bytes; the library takes no longer one
INDEX = ".index.json"


class Entry(NamedTuple):
    """Place, dtype and shape of the bytes of a tensor."""

    path: Path
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def form(self) -> str:
        """Dtype and shape, for a sentence."""
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


class WeightsFile:
    """The tensors of ``path``: a safetensors file, or the index of several.

    Attributes: entries: by name. digest: of all that the headers say; the same files have the same.
    Raises:     ConfigError: it cannot be read, or is none."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.entries: dict[str, Entry] = {}
        begins = []
        for part, names in self._parts().items():
            begin, entries = self._header(part)
            if missing := sorted(names - entries.keys()):
                raise self._damaged(f"{part.name} lacks {missing[0]}, which the index says it has")
            self.entries |= {name: entries[name] for name in (names or entries)}
            begins.append(begin)
        self.digest = checksum(b"".join(begins))

    def read(self, name: str, out: torch.Tensor) -> None:
        """Copy a tensor into ``out``, which has its dtype and shape; into the memory of the host at once.

        Raises: ConfigError: the file cannot be read, or is shorter than it was."""
        entry = self.entries[name]
        direct = out.device == CPU and out.is_contiguous()
        whole = out.detach() if direct else torch.empty(entry.shape, dtype=entry.dtype)
        data = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().data
        with self._told(), open_regular(entry.path) as file:
            file.seek(entry.start)
            done = 0
            while done < len(data):  # one call reads 2 GB at most
                if not (count := file.readinto(data[done:])):
                    raise self._damaged(f"it ends within {name}")
                done += count
        if not direct:
            out.copy_(whole)

    def _parts(self) -> dict[Path, set[str]]:
        """The files, each with the names that are looked for in it; none: all that it has."""
        if not self.path.name.endswith(INDEX):
            return {self.path: set()}
        found: dict[Path, set[str]] = {}
        with self._told(), open_regular(self.path, most=LONGEST_HEADER) as index:
            for name, file in json.load(index)["weight_map"].items():
                if Path(file).name != file:
                    raise self._damaged(f"it names {file}, and its files lie beside it")
                found.setdefault(self.path.with_name(file), set()).add(name)
        return found

    def _header(self, path: Path) -> tuple[bytes, dict[str, Entry]]:
        with self._told(), open_regular(path) as file:
            size = path.stat().st_size
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size, LONGEST_HEADER):
                raise ValueError("its header ends behind it")
            begin = file.read(length)
            said: dict[str, Any] = json.loads(begin)
            said.pop("__metadata__", None)
            return begin, {name: _entry(path, entry, 8 + length, size) for name, entry in said.items()}

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be read ({reason(error)}); give another file") from error
        except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
            raise self._damaged("its header is none") from error

    def _damaged(self, found: str) -> ConfigError:
        return ConfigError(
            f"weights are read from a safetensors file, or the *{INDEX} of several, and {self.path} is none, "
            f"or was cut short: {found}; give another file"
        )


def _entry(path: Path, said: Mapping[str, Any], begin: int, size: int) -> Entry:
    """Read what a header says of a tensor; raises ValueError where that cannot be."""
    start, end = said["data_offsets"]
    shape = tuple(said["shape"])
    try:
        dtype = dtype_named(str(said["dtype"]))
    except Exception as error:  # the library's own, which is a plain one
        raise ValueError(f"{said['dtype']} is no dtype of torch") from error
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
        raise ValueError("sizes are numbers from 0 on")
    if end - start != math.prod(shape) * dtype.itemsize or begin + end > size:
        raise ValueError("its bytes are not all there")
    return Entry(path, begin + start, dtype, shape)
