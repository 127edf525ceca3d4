"""Codecs by name: the lossless ones here, those that lose bits in ``lossy.py``."""

from .byte_plane import BytePlane
from .chained import Combined, ZeroValueLz4
from .exponent import Exponent
from .lossy import LOSSY_CODECS
from .names import check_name
from .narrow import Narrow
from .raw import Codec, Raw
from .zero_value import ZERO_VALUE

_EXPONENT, _BYTE_PLANE = Exponent(), BytePlane()
_LOSSLESS = (
    Raw(), ZERO_VALUE, ZeroValueLz4(ZERO_VALUE), _EXPONENT, Combined(ZERO_VALUE, _EXPONENT),
    _BYTE_PLANE, Combined(ZERO_VALUE, _BYTE_PLANE), Narrow(),
)  # fmt: skip
CODECS: dict[str, Codec] = {codec.name: codec for codec in _LOSSLESS}


def codec_named(name: str) -> Codec:
    """Return the codec ``name``, lossy ones included; a CodecError lists those there are if there is none."""
    found = CODECS.get(name) or LOSSY_CODECS.get(name) if isinstance(name, str) else None
    if found is None:
        check_name(name, auto=False)
    assert found is not None, "a known name stands for a codec"
    return found


def inner_of(codec: str) -> Codec | None:
    """Return the codec that a combination packs the values with."""
    return CODECS.get(codec.partition("+")[2])
