"""Tensors in one safetensors file, which no interruption can leave half true, read back one by one.

The library's own writer gives a hidden file its whole length and its header first, and a kill leaves zeros
that open as a model. Here bytes follow each other: no file is safetensors before its last byte is written.
A file with notes has a checksum of every tensor in its header, so whoever knows the header's reads what it
needs and no byte more, and knows that this is what was written."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..compression.errors import CheckpointError, ConfigError
from .device import CPU
from .files import open_regular, reason, writing

_UNKNOWN = "0" * 16  # a checksum that is told when the tensor was written


class Receipt(NamedTuple):
    """By what a file is known again: its length in bytes, and the checksum of its header."""

    num_bytes: int
    header: str


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    *,
    notes: Mapping[str, Any] | None = None,
    read: Callable[[str], Tensor] | None = None,
) -> Receipt:
    """Write ``tensors`` as safetensors; one memory under two names is written twice.

    Args:   notes: what JSON can say, kept in the header with strides and checksums of the tensors.
            read: returns a tensor by name, each once, one after the other (``in_order``), where ``tensors``
            are on the meta device.
    Raises: ConfigError: the file system refuses.
    """
    read = read or tensors.__getitem__
    names = in_order(tensors)
    checksums = dict.fromkeys(tensors, _UNKNOWN)
    header, end = dict[str, Any](), 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        header[name] = {
            "dtype": _name_of(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    begin = _begin(header, notes, tensors, checksums)
    with writing(path) as part, part.open("wb") as file:
        file.write(begin if notes is None else bytes(len(begin)))  # zeros are no safetensors
        for name in names:
            data = _bytes_of(read(name))
            file.write(data)
            if notes is not None:
                checksums[name] = checksum(data)
        if notes is not None:
            begin = _begin(header, notes, tensors, checksums)
            file.seek(0)
            file.write(begin)
    return Receipt(len(begin) + end, checksum(begin))


def in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of ``tensors`` in the order of a file, which keeps all aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


class TensorFile:
    """A file that ``write_tensors`` wrote with notes.

    Attributes: notes: those it was written with. names: of its tensors.
    Raises:     CheckpointError: it is not the file of the ``receipt``.
    """

    def __init__(self, path: Path, receipt: Receipt) -> None:
        self.path = path
        with self._told():
            if (found := path.stat().st_size) != receipt.num_bytes:
                raise _damaged(path, f"it has {found:,} bytes of {receipt.num_bytes:,}")
            with open_regular(path) as file:
                begin = file.read(8)
                (length,) = struct.unpack("<Q", begin)
                begin += file.read(min(length, receipt.num_bytes))
            if checksum(begin) != receipt.header:
                raise _damaged(path, "its header was altered")
            self._entries = json.loads(begin[8:])
            described = json.loads(self._entries.pop("__metadata__")["penstock"])
            self.notes: Mapping[str, Any] = described["notes"]
            self._checksums, self._strides = described["checksums"], described["strides"]
            self._start, self._num_bytes = len(begin), receipt.num_bytes
        self.names = frozenset(self._entries)

    def read(self, name: str) -> Tensor:
        """Return a tensor with the strides that it had.

        Raises: CheckpointError: its bytes were altered, or cannot be read.
        """
        entry = self._entries[name]
        start, end = entry["data_offsets"]
        if not 0 <= start <= end <= self._num_bytes - self._start:
            raise _damaged(self.path, f"{name} ends behind it")
        data = bytearray(end - start)
        with self._told(), open_regular(self.path) as file:
            file.seek(self._start + start)
            if file.readinto(data) != len(data) or checksum(data) != self._checksums[name]:
                raise _damaged(self.path, f"{name} was altered")
        dtype = dtype_named(entry["dtype"])
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        tensor = flat.reshape(entry["shape"])
        if name in self._strides:
            return torch.empty_strided(tensor.shape, self._strides[name], dtype=dtype).copy_(tensor)
        return tensor

    def shape(self, name: str) -> Tensor:
        """Return a tensor of the same shape and dtype, without memory."""
        entry = self._entries[name]
        return torch.empty(entry["shape"], dtype=dtype_named(entry["dtype"]), device="meta")

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read ({reason(error)}); take an earlier checkpoint"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
            raise _damaged(self.path, "its header is none") from error


def checksum(data: Any) -> str:
    """Return that of bytes, 64 bits as hexadecimal digits."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(data)


def _begin(
    entries: Mapping[str, Any],
    notes: Mapping[str, Any] | None,
    tensors: Mapping[str, Tensor],
    checksums: Mapping[str, str],
) -> bytes:
    """Return the first bytes of a file, as many whatever the checksums are."""
    header = dict(entries)
    if notes is not None:
        described = json.dumps(_described(notes, tensors, checksums), allow_nan=True)
        header = {"__metadata__": {"penstock": described}, **header}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _described(
    notes: Mapping[str, Any], tensors: Mapping[str, Tensor], checksums: Mapping[str, str]
) -> dict[str, Any]:
    # What repeats its elements is written, and comes back, row by row.
    strides = {
        n: list(t.stride()) for n, t in tensors.items() if 0 not in t.stride() and t.stride() != _rows(t)
    }
    return {"notes": notes, "checksums": checksums, "strides": strides}


def _rows(tensor: Tensor) -> tuple[int, ...]:
    """The strides of such a tensor row by row; is_contiguous leaves those of dimensions of 1 open."""
    return torch.empty(tensor.shape, device="meta").stride()


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8).numpy().data


def _damaged(path: Path, found: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {found} since it was written; take an earlier checkpoint")


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    """Return the format's name for ``dtype``, from the library, which knows them all."""
    from safetensors.torch import save

    return json.loads(save({"": torch.empty(0, dtype=dtype)})[8:])[""]["dtype"]


@functools.cache
def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that the format calls so; raises where it knows none."""
    from safetensors.torch import load

    text = json.dumps({"": {"dtype": name, "shape": [0], "data_offsets": [0, 0]}}).encode()
    return load(struct.pack("<Q", len(text)) + text)[""].dtype


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
