"""Places of a strided tensor's elements in memory: they travel in that order and come back to it.

Another stride or alignment picks another kernel and with it other bits, so sizes, strides and address travel
exactly (law L3).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from .errors import CodecError

ALIGNMENT = 64
MAX_DIMS = 64  # what torch's own element-wise kernels take
MAX_SPREAD = 64  # a tensor may span this many times its elements
_LIMIT = 1 << 63
WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


class Words(NamedTuple):
    """Words one after another in memory: what a codec packs, or where it unpacks to."""

    address: int
    num_words: int
    bits: int
    dtype: torch.dtype  # of the elements: what a word means

    @property
    def num_bytes(self) -> int:
        """Their length in memory."""
        return self.num_words * self.bits // 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Geometry:
    """One way to lie in memory.

    Words are the integers of 8, 16, 32 or 64 bits that the codecs see; a complex128 is two of them.
    """

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    num_elements: int  # as the tensor counts them
    num_stored: int  # places in memory: an element repeated by stride 0 counts once
    span: int  # elements from the first to the last place, gaps included
    walk: tuple[tuple[int, int], ...]  # (size, stride) of the dimensions that move, largest stride first
    order: str  # dense, gaps, scattered (dimensions interleave), overlapping or spread
    num_words: int  # that travel
    word_bits: int  # those of an element, at most 64
    words_per_item: int  # 2 for 16-byte elements, else 1

    @property
    def plausible(self) -> bool:
        """Return whether sizes and strides alone allow it in a frame, at no more cost than its dimensions.

        Of dimensions that interleave only a look at every place tells whether two elements share one."""
        return self.order not in ("overlapping", "spread")

    @property
    def travels(self) -> bool:
        """Return whether a frame may have this geometry; other tensors are made contiguous first.

        Asked of a tensor in memory: it may cost as much as the tensor is long."""
        return self.plausible and (self.order != "scattered" or _distinct(self.walk, self.span))


@lru_cache(maxsize=4096)
def geometry(sizes: tuple[int, ...], strides: tuple[int, ...], item_bytes: int) -> Geometry:
    """Describe a tensor of ``sizes`` and ``strides`` (elements) whose elements take ``item_bytes`` bytes;
    raise CodecError for more than 64 dimensions, or a size, stride or extent that no memory can hold."""
    if len(sizes) > MAX_DIMS:
        raise CodecError(f"a frame takes at most {MAX_DIMS} dimensions, found {len(sizes)}; reshape it")
    num_elements, most = math.prod(sizes), math.prod(size for size in sizes if size)
    dims = zip(sizes, strides, strict=True) if num_elements else ()
    walk = sorted(((n, s) for n, s in dims if n > 1 and s > 0), key=lambda d: -d[1])
    span = 1 + sum((n - 1) * s for n, s in walk) if num_elements else 0
    if max(most * item_bytes, span * item_bytes, *strides, 0) >= _LIMIT:
        found = f"sizes {tuple(sizes)} and strides {strides}"
        raise CodecError(f"a frame takes what 63 bits can address, found {found}; use a smaller tensor")
    num_stored = math.prod(n for n, _ in walk) if num_elements else 0
    return Geometry(
        sizes=sizes,
        strides=strides,
        item_bytes=item_bytes,
        num_elements=num_elements,
        num_stored=num_stored,
        span=span,
        walk=tuple(walk),
        order=_order(walk, num_stored, span),
        num_words=num_stored * max(1, item_bytes // 8),
        word_bits=8 * min(item_bytes, 8),
        words_per_item=max(1, item_bytes // 8),
    )


def in_memory(tensor: Tensor, span: int) -> bool:
    """Return whether the ``span`` elements from the first of ``tensor`` on are really there.

    They are not in a wrapper around other tensors, a fake tensor, or one whose storage was freed.
    """
    if not span:
        return True
    try:
        storage = tensor.untyped_storage()
        # Asked first: the address of a fake tensor, which has a type of its own, comes with a warning.
        fake = type(tensor) is not Tensor and storage.device.type == "meta"
        there = 0 if fake or not storage.data_ptr() else storage.nbytes()
    except RuntimeError:  # no storage at all
        return False
    return int(tensor.storage_offset() + span) * tensor.itemsize <= there


def _order(walk: Sequence[tuple[int, int]], num_stored: int, span: int) -> str:
    if num_stored > span:
        return "overlapping"  # more elements than places
    if span > MAX_SPREAD * num_stored:
        return "spread"
    reach = 0
    for size, stride in reversed(walk):
        if stride <= reach:  # a step of this dimension does not pass everything that the smaller ones reach
            return "scattered"
        reach += (size - 1) * stride
    return "dense" if num_stored == span else "gaps"


@lru_cache(maxsize=256)
def _distinct(walk: Sequence[tuple[int, int]], span: int) -> bool:
    num_places = int(torch.count_nonzero(_taken(walk, span, torch.device("cpu"))))
    return num_places == math.prod(size for size, _ in walk)


def _taken(walk: Sequence[tuple[int, int]], span: int, device: torch.device) -> Tensor:
    """Mark the ``span`` places that hold an element; only for dimensions that interleave: rare."""
    taken = torch.zeros(span, dtype=torch.bool, device=device)
    taken.as_strided([size for size, _ in walk], [stride for _, stride in walk]).fill_(True)
    return taken


def _view(
    storage: torch.UntypedStorage, first: int, geo: Geometry, dims: Sequence[tuple[int, int]]
) -> Tensor:
    """Words of ``storage`` from word ``first`` on through ``dims``, shape (*sizes, words per item)."""
    per_item = geo.words_per_item
    sizes = [size for size, _ in dims] + [per_item]
    strides = [stride * per_item for _, stride in dims] + [1]
    empty = torch.empty(0, dtype=WORDS[geo.word_bits], device=storage.device)
    return empty.set_(storage, first, sizes, strides)


def gather(tensor: Tensor, geo: Geometry) -> Tensor:
    """Copy the words of ``tensor`` (whose geometry is ``geo``) one after another; return new words, in memory
    order, or in the tensor's own order if ``geo`` may not travel."""
    if not geo.num_elements:
        return torch.empty(0, dtype=WORDS[geo.word_bits], device=tensor.device)
    storage, first = tensor.untyped_storage(), int(tensor.storage_offset()) * geo.words_per_item
    if not geo.travels:
        return _view(storage, first, geo, tuple(zip(geo.sizes, geo.strides, strict=True))).contiguous()
    if geo.order == "scattered":
        flat = _view(storage, first, geo, [(geo.span, 1)])
        return flat.masked_select(_taken(geo.walk, geo.span, flat.device)[:, None])
    return _view(storage, first, geo, geo.walk).contiguous()


def in_order(tensor: Tensor, geo: Geometry, *, words: bool = False) -> tuple[Tensor, Geometry, int]:
    """Bring the words of ``tensor``, any dense one of geometry ``geo``, one after another; a lazy conjugate
    or negation is carried out. ``words``: return a dense tensor, too, as words; else as it is.

    Return a tensor whose memory begins with the words, the geometry of its frame, and the address mod 64."""
    address = tensor.data_ptr() % ALIGNMENT
    address = 0 if address % geo.item_bytes else address
    back = geo
    if not geo.travels:
        strides = torch.empty(geo.sizes, dtype=torch.uint8, device="meta").stride()
        back = geometry(geo.sizes, strides, geo.item_bytes)
    if tensor.is_conj() or tensor.is_neg():
        tensor, geo = _resolved(tensor, geo), back
    if words or geo.order != "dense":
        tensor = gather(tensor, geo)
    return tensor, back, address


def _resolved(tensor: Tensor, geo: Geometry) -> Tensor:
    """A lazy conjugate or negation carried out, in memory that lies as before."""
    plain = tensor.detach()
    if not geo.travels:
        return plain.resolve_conj().resolve_neg().contiguous()
    for d, (size, stride) in enumerate(zip(geo.sizes, geo.strides, strict=True)):
        if size and not stride:
            plain = plain.narrow(d, 0, 1)
    kept = torch.empty_strided(plain.size(), geo.strides, dtype=tensor.dtype, device=tensor.device)
    return kept.copy_(plain)


def scatter(words: Tensor, storage: torch.UntypedStorage, first_byte: int, geo: Geometry) -> None:
    """Undo ``gather``: put ``words`` (as bytes) at their places in ``storage``, and zeros into the gaps;
    raise CodecError if two of them have one place."""
    first = first_byte // (geo.word_bits // 8)
    flat = _view(storage, first, geo, [(geo.span, 1)]).zero_()
    words = words.view(flat.dtype)
    if geo.order == "scattered":
        taken = _taken(geo.walk, geo.span, flat.device)
        if int(torch.count_nonzero(taken)) != geo.num_stored:
            found = f"sizes {geo.sizes}, strides {geo.strides}"
            raise CodecError(f"elements in a frame do not overlap, found {found}; it is damaged")
        flat.masked_scatter_(taken[:, None], words)
    else:
        view = _view(storage, first, geo, geo.walk)
        view.copy_(words.view(view.shape))
