"""Codecs by name: the lossless ones here, those that lose bits in ``lossy.py``."""

from __future__ import annotations

from .byte_plane import BytePlane
from .chained import Combined, ZeroValueLz4
from .exponent import Exponent
from .lossy import LOSSY_CODECS
from .names import check_name
from .narrow import Narrow
from .raw import Codec, Raw
from .zero_value import ZeroValue


def codecs_on(isa: str | None) -> dict[str, Codec]:
    """Return all lossless codecs by name, on kernels of one instruction set (None: the host's best)."""
    zero_value, exponent, byte_plane = ZeroValue(isa), Exponent(isa), BytePlane(isa)
    simple = Raw(), zero_value, ZeroValueLz4(zero_value), exponent
    others = Combined(zero_value, exponent), byte_plane, Combined(zero_value, byte_plane), Narrow(isa)
    return {codec.name: codec for codec in (*simple, *others)}


CODECS = codecs_on(None)


def codec_named(name: str) -> Codec:
    """Return the codec ``name``, lossy ones included.

    Raises:
        CodecError: There is none; the message lists those there are.
    """
    found = CODECS.get(name) or LOSSY_CODECS.get(name) if isinstance(name, str) else None
    if found is None:
        check_name(name, auto=False)
    assert found is not None, "a known name stands for a codec"
    return found


def inner_of(codec: str) -> Codec | None:
    """Return the codec that a combination packs the values with."""
    return CODECS.get(codec.partition("+")[2])
