"""The codecs by name: lossless ones, and apart from them those that lose bits.

Source: patent CN115016937A, claim 7 (zero-value compression); the others are named in their own files.
"""

from __future__ import annotations

from .byte_plane import BytePlane
from .combined import Combined
from .exponent import Exponent
from .lossy import LOSSY_CODECS
from .lz import ZeroValueLz4
from .names import check_name
from .narrow import Narrow
from .raw import Codec, Raw
from .zero_value import ZeroValue

ZERO_VALUE, EXPONENT, BYTE_PLANE = ZeroValue(), Exponent(), BytePlane()
CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Raw(),
        ZERO_VALUE,
        ZeroValueLz4(ZERO_VALUE),
        EXPONENT,
        Combined(ZERO_VALUE, EXPONENT),
        BYTE_PLANE,
        Combined(ZERO_VALUE, BYTE_PLANE),
        Narrow(),
    )
}


def codec_named(name: str) -> Codec:
    """The codec called ``name``, lossy ones included.

    Raises: CodecError: there is none; the message lists those there are.
    """
    check_name(name, auto=False)
    return CODECS.get(name) or LOSSY_CODECS[name]


def inner_of(codec: str) -> Codec | None:
    """The codec that a combination packs the values with."""
    return CODECS.get(codec.partition("+")[2])
