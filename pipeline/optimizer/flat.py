"""Gradients in one flat buffer for each dtype, each at the offset of its parameter.

They lie in the order in which a backward ends them, the last parameter first, so that a slice of the buffer
is whole while the backward goes on before it. A gradient that there is none of is -0.0 throughout, to which
adding changes no bit of a sum: 0.0 would make 0.0 of -0.0. So buffers add up whole, whichever parameters got
a gradient where. They are used again in each step: new memory costs a system more than the copies into it."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import torch

from ...compression.errors import StageError
from .optimizers import Named

Buffers = Mapping[torch.dtype, torch.Tensor]
Gradients = Sequence[torch.Tensor | None]
SLICE_BYTES = 4 << 20  # long against the time that a collective takes to begin, short against a backward


@dataclasses.dataclass(frozen=True)
class Slice:
    """Elements ``start`` to ``stop`` of the buffer of a dtype: gradients of the parameters at ``places``,
    which the replica ``owner`` updates, if one does."""

    dtype: torch.dtype
    start: int
    stop: int
    places: tuple[int, ...]
    owner: int | None = None


def owners_of(sizes: Sequence[int], *, replicas: int) -> list[int]:
    """The updater of each parameter of so many bytes, neighbours together and bytes evenly."""
    found, begin, whole = list[int](), 0, max(1, sum(sizes))
    for size in sizes:
        found.append(min(replicas - 1, (2 * begin + size) * replicas // (2 * whole)))
        begin += size
    return found


class FlatGradients:
    """The buffers of the gradients of the ``named`` parameters of a stage, on the host.

    ``offsets``: by dtype of each parameter its place among them and its offset in the buffer.
    ``slices``: whole parameters of some bytes each, in the order in which they are likely to be final.

    Args:    pieces: into how many equal parts a buffer must go.
             owners: by place the replica that updates a parameter; none: all of them do.
             reuses: memory of buffers stays for the next step."""

    def __init__(
        self, named: Named, *, pieces: int, owners: Sequence[int] = (), slice_bytes: int = SLICE_BYTES,
        reuses: bool = True,
    ) -> None:  # fmt: skip
        self.owners, self.reuses = owners or [None] * len(named), reuses
        self.layouts = [torch.empty_like(p, device="meta", requires_grad=False) for _, p in named]
        self.named, self.offsets, self.sizes = named, dict[torch.dtype, list[tuple[int, int]]](), {}
        for place, (_, parameter) in reversed([*enumerate(named)]):
            dtype = parameter.dtype  # whole numbers have no gradient, and torch adds no two of eight bits
            if (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1:
                start = self.sizes.get(dtype, 0)
                self.offsets.setdefault(dtype, []).append((place, start))
                self.sizes[dtype] = start + parameter.numel()
        self.slices = sorted(self._sliced(slice_bytes), key=lambda one: -min(one.places))
        self.sizes = {dtype: -(-size // pieces) * pieces for dtype, size in self.sizes.items()}
        self._spent: list[dict[torch.dtype, torch.Tensor]] = []

    def _sliced(self, slice_bytes: int) -> list[Slice]:
        found = []
        for dtype, offsets in self.offsets.items():
            places, begin = list[int](), 0
            for (place, start), (after, _) in pairwise([*offsets, (-1, 0)]):
                places.append(place)
                stop, owner = start + self.named[place][1].numel(), self.owners[place]
                full = (stop - begin) * dtype.itemsize >= slice_bytes
                if full or after < 0 or self.owners[after] != owner:
                    found.append(Slice(dtype, begin, stop, tuple(places), owner))
                    places, begin = [], stop
        return found

    def buffers(self) -> dict[torch.dtype, torch.Tensor]:
        """Buffers to ``take`` every gradient into, -0.0 behind the last: given back before, else new."""
        if self._spent:
            return self._spent.pop()
        return {dtype: torch.full((size,), _none(dtype), dtype=dtype) for dtype, size in self.sizes.items()}

    def give_back(self, *spent: dict[torch.dtype, torch.Tensor]) -> None:
        """Nobody reads these buffers any more, nor writes them."""
        if self.reuses:
            self._spent += spent

    def gather(
        self, gradients: Gradients, into: dict[torch.dtype, torch.Tensor] | None = None
    ) -> dict[torch.dtype, torch.Tensor]:
        """Copies of the ``gradients`` by place, of all parameters together; ``into``: buffers with others of
        them, which get those that there are."""
        found = self.buffers() if into is None else into
        for dtype, offsets in self.offsets.items():
            for place, start in offsets:
                if into is None or gradients[place] is not None:
                    self.take(found[dtype], place, start, gradients[place])
        return found

    def parameters(self, flats: Buffers, one: Slice) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each parameter of a slice, and where its gradient is in ``flats``."""
        start = one.start
        for place in one.places:
            parameter, layout = self.named[place][1].detach(), self.layouts[place]
            yield parameter, flats[one.dtype][start : (start := start + layout.numel())].view(layout.shape)

    def take(self, flat: torch.Tensor, place: int, start: int, gradient: torch.Tensor | None) -> None:
        """Copy the gradient of the parameter at ``place``, -0.0 for none, to ``flat`` from ``start`` on."""
        if gradient is None:
            flat[start : start + self.layouts[place].numel()].fill_(_none(flat.dtype))
            return
        if gradient.layout != torch.strided:
            name, _ = self.named[place]
            raise StageError(
                f"replicas add up dense gradients, and {name} has a sparse one; make its layer with "
                "sparse=False, or take one rank a stage"
            )
        flat[start : start + gradient.numel()].view(gradient.shape).copy_(gradient)

    def spread(
        self, flats: Buffers, has: Sequence[int], *, like: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor | None]:
        """Return the gradients of ``flats`` by place; None where no replica ``has`` one. They are written
        into ``like``; where that is None, or on the meta device, they are made in its layout, or the
        parameter's."""
        found: dict[int, torch.Tensor | None] = {}
        for place, dtype, start in ((p, d, s) for d, offsets in self.offsets.items() for p, s in offsets):
            layout, into = self.layouts[place], like[place]
            if not has[place]:
                found[place] = None
                continue
            if into is None or into.is_meta:
                device = self.named[place][1].device
                into = torch.empty_like(layout if into is None else into, device=device)
            flat = flats[dtype][start : start + layout.numel()]
            found[place] = into.copy_(flat.view(layout.shape))
        return found


def _none(dtype: torch.dtype) -> complex:
    return complex(-0.0, -0.0) if dtype.is_complex else -0.0
