"""Tensors in one safetensors file, which no interruption can leave half true, read back one by one.

The library's own writer writes its header first, and a kill leaves zeros that open as a model. Here no file
is safetensors before its last byte is written. A file with notes has a checksum of every tensor in its
header, so whoever knows the header's reads what it needs and knows that this is what was written."""

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

from ..compression.errors import CheckpointError, ConfigError, PenstockError
from .device import CPU
from .files import open_regular, reason, writing

_UNKNOWN = "0" * 16  # a checksum, until the tensor is written
LONGEST_HEADER = 100_000_000  # bytes; the library takes no longer one
INDEX = ".index.json"


class Receipt(NamedTuple):
    """Length of a file in bytes, and the checksum of its header."""

    num_bytes: int
    header: str


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], *, notes: Mapping[str, Any] | None = None,
    read: Callable[[str], Tensor] | None = None,
) -> Receipt:  # fmt: skip
    """Write ``tensors`` as safetensors; ConfigError if the file system refuses.

    Args:   notes: what JSON can say, kept in the header with strides and checksums of the tensors.
            read: returns a tensor by name, ``in_order``, where ``tensors`` are on the meta device."""
    read = read or tensors.__getitem__
    names, checksums = in_order(tensors), dict.fromkeys(tensors, _UNKNOWN)
    header, end = dict[str, Any](), 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        place = {"shape": list(tensor.shape), "data_offsets": [start, end]}
        header[name] = {"dtype": _name_of(tensor.dtype), **place}
    begin = _begin(header, notes, tensors, checksums)
    with writing(path) as part, part.open("wb") as file:
        file.write(begin if notes is None else bytes(len(begin)))  # zeros are no safetensors
        for name in names:
            data = bytes_of(read(name))
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

    def read(self, data: memoryview) -> bool:
        """Fill ``data`` with the bytes of the tensor; False: the file ends before."""
        with open_regular(self.path) as file:
            file.seek(self.start)
            done = 0
            while done < len(data):  # one call reads 2 GB at most
                if not (count := file.readinto(data[done:])):
                    return False
                done += count
        return True


class _SafetensorsFile:
    path: Path
    error: type[PenstockError]
    damage: str  # a sentence around what was ``found``
    remedy: str

    def _header(self, path: Path, receipt: Receipt | None = None) -> tuple[bytes, Any, dict[str, Entry]]:
        """Return the first bytes of a file up to its tensors, its metadata, and what it says of each."""
        with open_regular(path) as file:
            size, begin = path.stat().st_size, file.read(8)
            if receipt is not None and size != receipt.num_bytes:
                raise self._damaged(f"it has {size:,} bytes of {receipt.num_bytes:,}")
            (length,) = struct.unpack("<Q", begin)
            if length > min(size, LONGEST_HEADER):
                raise ValueError("its header ends behind it")
            begin += file.read(length)
        if receipt is not None and checksum(begin) != receipt.header:
            raise self._damaged("its header was altered")
        header = json.loads(begin[8:])
        metadata = header.pop("__metadata__", None)
        return begin, metadata, _entries(path, header, len(begin), size)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.error(f"{self.path} cannot be read ({reason(error)}); {self.remedy}") from error
        except (ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
            raise self._damaged("its header is none") from error

    def _damaged(self, found: str) -> PenstockError:
        return self.error(f"{self.damage.format(path=self.path, found=found)}; {self.remedy}")


def _entries(path: Path, header: Mapping[str, Any], begin: int, size: int) -> dict[str, Entry]:
    """Read what a header of ``begin`` bytes says of each tensor; raises ValueError where that cannot be."""
    entries: dict[str, Entry] = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        try:
            dtype = dtype_named(str(entry["dtype"]))
        except Exception as error:  # the library's own, which is a plain one
            raise ValueError(f"{entry['dtype']} is no dtype of torch") from error
        if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
            raise ValueError("sizes are numbers from 0 on")
        if end - start != math.prod(shape) * dtype.itemsize or begin + end > size:
            raise ValueError("its bytes are not all there")
        entries[name] = Entry(path, begin + start, dtype, shape)
    return entries


class TensorFile(_SafetensorsFile):
    """A file that ``write_tensors`` wrote with ``notes``; CheckpointError if it has another ``receipt``."""

    error, remedy = CheckpointError, "take an earlier checkpoint"
    damage = "{path} is damaged: {found} since it was written"

    def __init__(self, path: Path, receipt: Receipt) -> None:
        self.path = path
        with self._refusing():
            _, metadata, self._entries = self._header(path, receipt)
            described = json.loads(metadata["penstock"])
            self.notes: Mapping[str, Any] = described["notes"]
            self._checksums, self._strides = described["checksums"], described["strides"]
        self.names = frozenset(self._entries)

    def read(self, name: str) -> Tensor:
        """Return a tensor with the strides that it had; CheckpointError if it was altered."""
        entry = self._entries[name]
        data = bytearray(math.prod(entry.shape) * entry.dtype.itemsize)
        with self._refusing():
            if not entry.read(memoryview(data)) or checksum(data) != self._checksums[name]:
                raise self._damaged(f"{name} was altered")
        flat = torch.frombuffer(data, dtype=entry.dtype) if data else torch.empty(0, dtype=entry.dtype)
        tensor = flat.reshape(entry.shape)
        if name in self._strides:
            return torch.empty_strided(entry.shape, self._strides[name], dtype=entry.dtype).copy_(tensor)
        return tensor

    def shape(self, name: str) -> Tensor:
        """Return a tensor of the same shape and dtype, without memory."""
        entry = self._entries[name]
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")


class WeightsFile(_SafetensorsFile):
    """The tensors that people bring in ``path``: a safetensors file, or the index of several.

    The library maps a file, so that all that was looked at counts as memory of the process.

    Attributes: entries: by name. digest: of all that the headers say; the same files have the same."""

    error, remedy = ConfigError, "give another file"
    damage = (
        f"weights are read from a safetensors file, or the *{INDEX} of several, and "
        "{path} is none, or was cut short: {found}"
    )

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.entries: dict[str, Entry] = {}
        begins = []
        with self._refusing():
            for part, names in self._parts().items():
                begin, _, entries = self._header(part)
                if missing := sorted(names - entries.keys()):
                    raise self._damaged(f"{part.name} lacks {missing[0]}, which the index says it has")
                self.entries |= {name: entries[name] for name in (names or entries)}
                begins.append(begin)
        self.digest = checksum(b"".join(begins))

    def read(self, name: str, out: Tensor) -> None:
        """Copy a tensor into ``out``, which has its dtype and shape; ConfigError if the file is shorter."""
        entry = self.entries[name]
        direct = out.device == CPU and out.is_contiguous()
        whole = out.detach() if direct else torch.empty(entry.shape, dtype=entry.dtype)
        with self._refusing():
            if not entry.read(whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy().data):
                raise self._damaged(f"it ends within {name}")
        if not direct:
            out.copy_(whole)

    def _parts(self) -> dict[Path, set[str]]:
        """Return the files, each with the names that are looked for in it; none: all that it has."""
        if not self.path.name.endswith(INDEX):
            return {self.path: set()}
        parts: dict[Path, set[str]] = {}
        with open_regular(self.path, most=LONGEST_HEADER) as index:
            for name, file in json.load(index)["weight_map"].items():
                if Path(file).name != file:
                    raise self._damaged(f"it names {file}, and its files lie beside it")
                parts.setdefault(self.path.with_name(file), set()).add(name)
        return parts


def checksum(data: Any) -> str:
    """Return that of bytes, 64 bits as hexadecimal digits."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(data)


def _begin(
    entries: Mapping[str, Any], notes: Mapping[str, Any] | None, tensors: Mapping[str, Tensor],
    checksums: Mapping[str, str],
) -> bytes:  # fmt: skip
    """Return the first bytes of a file, as many whatever the checksums are."""
    header = dict(entries)
    if notes is not None:
        # what repeats its elements is written, and comes back, row by row
        rows = {name: torch.empty(t.shape, device="meta").stride() for name, t in tensors.items()}
        others = {n: t.stride() for n, t in tensors.items() if 0 not in t.stride() and t.stride() != rows[n]}
        described = json.dumps({"notes": notes, "checksums": checksums, "strides": others})
        header = {"__metadata__": {"penstock": described}, **header}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the elements of a dense tensor in their order."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))  # one element may have any stride
    return flat.view(torch.uint8).numpy().data


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    from safetensors.torch import save

    try:
        return json.loads(save({"": torch.empty(0, dtype=dtype)})[8:])[""]["dtype"]
    except KeyError as error:
        raise ConfigError(f"safetensors has no {dtype}; keep this tensor in another dtype") from error


def check_storable(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that no file takes; raises ConfigError, which names the first."""
    for name, tensor in tensors.items():
        try:
            _name_of(tensor.dtype)
        except ConfigError as error:
            raise ConfigError(f"checkpoints and weights keep {name}: {error}") from error


@functools.cache
def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that the format calls so, from the library; raises where it knows none."""
    from safetensors.torch import load

    text = json.dumps({"": {"dtype": name, "shape": [0], "data_offsets": [0, 0]}}).encode()
    return load(struct.pack("<Q", len(text)) + text)[""].dtype
