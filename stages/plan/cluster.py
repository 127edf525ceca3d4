"""Cluster: machines that are not alike, as a YAML file names them: the speed and memory of each rank, and the
rates between neighbours. A plan can be made for them on another machine."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ...compression.errors import PlanError
from ..units import parse_bytes, parse_rate, show_bytes, show_rate

MOST_ORDERS = 24
_OF_FILE = ("ranks", "devices", "links")
_OF_DEVICE = ("speed", "memory")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Ranks of a chain that differ.

    Attributes:
        names: The device of each rank.
        speeds: How fast each computes, measured by the machine whose seconds are in the profile: 0.5 takes
            twice as long.
        memory: The most bytes of each; None: no limit.
        links: Bits per second from each rank to the next and back; None: free.
    """

    names: tuple[str, ...]
    speeds: tuple[float, ...]
    memory: tuple[int | None, ...]
    links: tuple[float | None, ...]

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a YAML file; PlanError: it is missing or damaged, a device is unknown, a link is missing."""
        return cls.of(read_cluster(path), str(path))

    @classmethod
    def of(cls, data: Any, source: str = "cluster") -> Cluster:
        """The cluster that ``data`` of such a file describe; PlanError where they do not."""
        known = _fields(data, _OF_FILE, source)
        devices, links, ranks = known.get("devices"), known.get("links") or {}, known.get("ranks")
        if not (isinstance(devices, dict) and isinstance(links, dict) and isinstance(ranks, list) and ranks):
            raise PlanError(
                f"{source} has ranks: [NAME, ...], devices: {{NAME: {{speed, memory}}}} and links: "
                f"{{NAME-NAME: RATE}}, found {sorted(map(str, known))}; give these"
            )
        if unknown := [name for name in ranks if name not in devices]:
            raise PlanError(
                f"ranks are names of devices ({', '.join(map(str, devices))}), found {unknown[0]} in "
                f"{source}; add it to devices:"
            )
        found = {name: _device(name, one, source) for name, one in devices.items()}
        _check_links(links, devices, source)
        rates = [_rate(links, *pair, source=source) for pair in itertools.pairwise(ranks)]
        return cls(
            names=tuple(map(str, ranks)),
            speeds=tuple(found[name][0] for name in ranks),
            memory=tuple(found[name][1] for name in ranks),
            links=tuple(rates),
        )

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.names)

    def check(self, num_ranks: int) -> None:
        """Refuse another number of ranks than ``num_ranks``, and numbers that are none."""
        counts = len(self.speeds), len(self.memory), len(self.links) + 1
        numbers = [one for one in (*self.speeds, *self.memory, *self.links) if one is not None]
        if {self.num_ranks, *counts} != {num_ranks} or min(numbers) <= 0:
            raise PlanError(
                f"a cluster has a speed above 0 and a memory for each of {num_ranks} ranks, and links "
                f"between neighbours, found {self}; make the plan anew"
            )

    def __str__(self) -> str:
        parts = []
        for rank, name in enumerate(self.names):
            memory = self.memory[rank]
            limit = "" if memory is None else f" {show_bytes(memory)}"
            parts.append(f"{name} ({self.speeds[rank]:g}x{limit})")
            if rank < len(self.links):
                rate = self.links[rank]
                parts.append("-" if rate is None else f"- {show_rate(rate)} -")
        return " ".join(parts)


def read_cluster(path: str | Path) -> Any:
    """Return the content of a YAML file, which ``Cluster.of`` takes."""
    from omegaconf import OmegaConf  # on demand: it takes 0.1 s
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(OmegaConf.load(path))  # which refuses a key that comes twice
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException, RecursionError) as error:
        raise PlanError(f"cluster={path} is a YAML file, which cannot be read: {error}") from error


def orders(data: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Other orders of the ranks of a file that is read already: every one of up to ``MOST_ORDERS``, else
    those in which two ranks have changed places."""
    given, counts = list(data["ranks"]), Counter(data["ranks"])
    number = math.factorial(len(given)) // math.prod(map(math.factorial, counts.values()))
    found = _arrangements(counts) if number <= MOST_ORDERS else _swapped(given)
    yield from (ranks for ranks in found if ranks != given)


def _arrangements(counts: Counter[Any]) -> Iterator[list[Any]]:
    left = [name for name in counts if counts[name]]
    if not left:
        yield []
    for name in left:
        for rest in _arrangements(counts - Counter([name])):
            yield [name, *rest]


def _swapped(given: Sequence[Any]) -> Iterator[list[Any]]:
    for one, other in itertools.combinations(range(len(given)), 2):
        ranks = list(given)
        ranks[one], ranks[other] = given[other], given[one]
        yield ranks


def _fields(data: Any, names: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(data, dict) or set(data) - {*names}:
        found = sorted(map(str, set(data) - {*names})) if isinstance(data, dict) else type(data).__name__
        raise PlanError(f"{where} has the keys {', '.join(names)} alone, found {found}; leave out the rest")
    return data


def _device(name: object, data: Any, source: str) -> tuple[float, int | None]:
    """The speed and memory of a device."""
    where = f"device {name} in {source}"
    facts = _fields({} if data is None else data, _OF_DEVICE, where)
    speed, memory = facts.get("speed", 1.0), facts.get("memory")
    if isinstance(speed, bool) or not isinstance(speed, int | float) or not 0 < speed < float("inf"):
        raise PlanError(
            f"speed is a number above 0, 1 for the machine that measures, found {speed!r} for {where}"
        )
    return float(speed), None if memory is None else parse_bytes(memory, name=f"memory of {where}")


def _check_links(links: Mapping[Any, Any], devices: Mapping[Any, Any], source: str) -> None:
    """Refuse links of unknown devices, and two rates for one link."""
    pairs = {f"{one}-{other}": f"{other}-{one}" for one in devices for other in devices}
    if unknown := [key for key in links if key not in pairs and key != "default"]:
        raise PlanError(
            f"links are between two devices ({', '.join(map(str, devices))}) or default, found {unknown[0]} "
            f"in {source}; write NAME-NAME: RATE"
        )
    for key in links:
        back = pairs.get(key, key)
        if back in links and links[back] != links[key]:
            raise PlanError(
                f"a link has one rate for both ways, found {key}: {links[key]} and {back}: {links[back]} in "
                f"{source}; drop one"
            )


def _rate(links: Mapping[Any, Any], one: Any, other: Any, *, source: str) -> float | None:
    """The rate between two devices; ``default`` holds where they are not named."""
    key = next((key for key in (f"{one}-{other}", f"{other}-{one}", "default") if key in links), None)
    if key is None:
        raise PlanError(
            f"links has a rate between ranks that follow each other, found none for {one}-{other} in "
            f"{source}; give it, or default: (null: no limit)"
        )
    return None if links[key] is None else parse_rate(links[key], name=f"link {key}")
