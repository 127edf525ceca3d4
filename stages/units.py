"""Sizes and rates as people write them: ``2GiB``, ``1.5MB``, ``100Mbit``, and back."""

import math
import re
from collections.abc import Collection, Sequence
from fractions import Fraction

from ..compression.errors import PlanError

_DECIMAL = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTES = {"": 1, "B": 1}
_BYTES |= {f"{letter}B": factor for letter, factor in _DECIMAL.items()}
_BYTES |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
_BITS = {"": 1, "bit": 1} | {f"{letter}bit": factor for letter, factor in _DECIMAL.items()}
_SECONDS = {"": 1, "s": 1, "min": 60, "h": 3600}
_WRITTEN = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([A-Za-z]*)")


def parse_bytes(value: int | str, *, name: str = "memory") -> int:
    """Bytes in ``"2GiB"``, ``"64KiB"``, ``"1.5MB"`` or a plain number; else PlanError naming it."""
    refusal = f"{name}={value} is not a size in bytes; write it like 2GiB, 64KiB, 1.5MB or 1000000"
    return int(_parse(value, _BYTES, refusal, least=1))


def is_zero(value: object) -> bool:
    """Return whether a size is written that is none, as 0, 0.0 or ``"0GiB"``."""
    return re.fullmatch(r"0+(\.0*)?\s*[A-Za-z]*", str(value).strip()) is not None


def share_of(value: object, *, name: str = "memory") -> float | None:
    """The share in ``"25%"``, None where ``value`` is no share; PlanError where it is a wrong one."""
    if not isinstance(value, str) or not value.strip().endswith("%"):
        return None
    try:
        share = float(value.strip()[:-1]) / 100
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise PlanError(f"{name}={value} is not a share above 0% and up to 100%; write it like 25%, or 2GiB")
    return share


def parse_rate(value: float | str, *, name: str = "link") -> float:
    """Bits per second in ``"1Gbit"`` or a plain number; else PlanError, which names the value."""
    refusal = f"{name}={value} is not a rate in bits per second; write it like 1Gbit, 100Mbit or 1000000000"
    return float(_parse(value, _BITS, refusal))


def parse_duration(value: float | str, *, name: str) -> float:
    """Seconds in ``"10min"``, ``"30s"``, ``"2h"`` or a plain number; else PlanError naming it."""
    return float(_parse(value, _SECONDS, f"{name}={value} is not a time; write it like 30s, 10min or 2h"))


def show_bytes(num_bytes: float) -> str:
    """``"1.5 MiB"``: four characters of number at most, and the binary unit."""
    return _show(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def show_rate(bits_per_second: float) -> str:
    """``"100 Mbit/s"``."""
    return _show(bits_per_second, 1000, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def show_seconds(seconds: float) -> str:
    """``"12.3 ms"``."""
    return _show(seconds * 1e6, 1000, ("us", "ms", "s"))


def show_count(count: float) -> str:
    """``"11.2 M"``: a number of things."""
    return _show(count, 1000, ("", "k", "M", "G", "T")).rstrip()


def shortened_name(name: str, most: int) -> str:
    """A name of ``most`` characters at most; its end tells more than its start."""
    return name if len(name) <= most else f"..{name[2 - most :]}"


def text_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[str]
) -> list[str]:
    """Return the lines of a table in columns; those under the headings ``right`` are aligned there."""
    lines = [headings, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.rjust if heading in right else str.ljust for heading in headings]
    return [
        "  ".join(s(c, w) for s, c, w in zip(sides, line, widths, strict=True)).rstrip() for line in lines
    ]


def _parse(value: float | str, units: dict[str, int], refusal: str, *, least: int = 0) -> Fraction:
    number = Fraction(0)
    if isinstance(value, str):
        found = _WRITTEN.fullmatch(value.strip())
        if found and found[2] in units:
            number = Fraction(found[1]) * units[found[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        number = Fraction(value)
    if number <= 0 or number < least:
        raise PlanError(refusal)
    return number


def _show(number: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while number >= base - 0.5 and power + 1 < len(units):  # 1023.7 KiB reads as 1.0 MiB
        number, power = number / base, power + 1
    digits = 1 if power and number < 99.95 else 0
    return f"{number:.{digits}f}".removesuffix(".0") + f" {units[power]}"
