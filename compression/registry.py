"""The codecs by name: lossless ones, and apart from them those that lose bits."""

from __future__ import annotations

from .byte_plane import BytePlane
from .chained import Combined, ZeroValueLz4
from .exponent import Exponent
from .kernels.jit import exponent_kernels
from .lossy import LOSSY_CODECS
from .names import check_name
from .narrow import Narrow
from .raw import Codec, Raw
from .zero_value import ZeroValue


def codecs_on(isa: str | None, zero_value: ZeroValue) -> dict[str, Codec]:
    """All lossless codecs by name, on the kernels of one instruction set (None: the machine's best).

    Raises: CodecError: this machine has no such instruction set.
    """
    exponent, byte_plane = Exponent(exponent_kernels(isa) if isa else None), BytePlane(isa)
    simple = Raw(), zero_value, ZeroValueLz4(zero_value), exponent
    others = Combined(zero_value, exponent), byte_plane, Combined(zero_value, byte_plane), Narrow(isa)
    return {codec.name: codec for codec in (*simple, *others)}


ZERO_VALUE = ZeroValue()
CODECS = codecs_on(None, ZERO_VALUE)


def codec_named(name: str) -> Codec:
    """The codec called ``name``, lossy ones included.

    Raises: CodecError: there is none; the message lists those there are.
    """
    found = CODECS.get(name) or LOSSY_CODECS.get(name) if isinstance(name, str) else None
    if found is None:
        check_name(name, auto=False)
    assert found is not None, "a known name stands for a codec"
    return found


def inner_of(codec: str) -> Codec | None:
    """The codec that a combination packs the values with."""
    return CODECS.get(codec.partition("+")[2])
