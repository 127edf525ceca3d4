"""Which replica of a stage takes a micro-batch: dealt by weight and smoothly, the same wherever it is asked.

Every replica has credit: each micro-batch adds its share to it, and who has most takes the micro-batch and
pays for all. So any run of micro-batches is spread as the shares say, the first ones do not depend on how
many there are, and equal shares are plain turns.

Source: smooth weighted round robin as nginx deals requests (ngx_http_upstream_round_robin.c, since 1.3.1)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ...compression.errors import PlanError
from ..record import shortened


def place_of(shares: tuple[int, ...], micro_batch: int) -> int:
    """The place of the replica that takes ``micro_batch``; equals go to the first, and who has no share gets
    nothing."""
    return _places(shares, 1 << micro_batch.bit_length())[micro_batch]


def counts_of(shares: tuple[int, ...], number: int) -> list[int]:
    """How many of the first ``number`` micro-batches each replica takes."""
    places = _places(shares, 1 << number.bit_length())[:number]
    return [places.count(place) for place in range(len(shares))]


@functools.lru_cache(maxsize=1024)
def _places(shares: tuple[int, ...], number: int) -> tuple[int, ...]:
    credit, total, found = [0] * len(shares), sum(shares), list[int]()
    for _ in range(number):
        credit = [one + share for one, share in zip(credit, shares, strict=True)]
        place = credit.index(max(credit))
        credit[place] -= total
        found.append(place)
    return tuple(found)


def check_shares(shares: Sequence[object], *, replicas: int, of: str) -> None:
    """Refuse shares by which nothing can be dealt to so many replicas; ``of``: what they are of.

    Raises:  PlanError: there are others than replicas, one is no whole number from 0, or all are 0."""
    shown = shortened(list(shares))
    if len(shares) != replicas:
        raise PlanError(
            f"each replica of a stage has a share, found shares {shown} for {replicas} {of}; give as many"
        )
    if wrong := [one for one in shares if type(one) is not int or one < 0]:
        raise PlanError(
            f"the share of a replica is a whole number from 0, found {wrong[0]!r} in shares {shown} {of}; "
            "give 0 to one that shall get nothing"
        )
    if not any(shares):
        raise PlanError(f"some replica of a stage has a share, found shares {shown} {of}; raise one above 0")


def split_shares(shares: Sequence[int], ranks: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The shares of each stage on its ``ranks``, from those of all ranks in their order; () where they are
    alike, or a stage has one rank.

    Raises:  PlanError: there are others than ranks, or a stage cannot be dealt by them."""
    number = sum(map(len, ranks))
    if len(shares) != number:
        raise PlanError(
            f"there is a share for each rank, found {len(shares)} shares for {number} ranks; give as many"
        )
    found = ([shares[rank] for rank in own] for own in ranks)
    return tuple(shares_of_stage(some, stage, len(some)) for stage, some in enumerate(found))


def shares_of_stage(shares: Sequence[int], stage: int, replicas: int) -> tuple[int, ...]:
    """The shares of a stage that has so many replicas; () where they are alike.

    Raises:  PlanError: it cannot be dealt by them."""
    if shares:
        check_shares(shares, replicas=replicas, of=f"of stage {stage}")
    return tuple(shares) if len(set(shares)) > 1 else ()
