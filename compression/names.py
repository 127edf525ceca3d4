"""The names of codecs and of devices, known before torch is: a wrong name is refused at once.

``registry.py`` and ``lossy.py`` hold what the names stand for; a test holds the lists against each other.
"""

import re

from .errors import CodecError

HOST = "cpu"
"""The kind of device whose memory is the host's."""

GPU = "cuda"
"""What torch calls the kind of device whose work is queued, with a memory of its own."""

AUTO = "auto"
# A codec's number in a frame's header is its place here, for ever: append, never reorder.
CODEC_NAMES = (
    "raw", "zero_value", "zero_value+lz4", "exponent", "zero_value+exponent", "byte_plane",
    "zero_value+byte_plane", "narrow", "bf16", "fp8", "int8",
)  # fmt: skip
LOSSY = ("bf16", "fp8", "int8")


def is_device(name: object) -> bool:
    """Return whether a rank can compute on this: cpu, cuda, or one GPU by its number, cuda:1."""
    return isinstance(name, str) and re.fullmatch(rf"{HOST}|{GPU}(:[0-9]{{1,4}})?", name) is not None


def lossless() -> tuple[str, ...]:
    """The names of the codecs that lose nothing."""
    return tuple(name for name in CODEC_NAMES if name not in LOSSY)


def check_name(codec: object, *, auto: bool = True) -> None:
    """Refuse what is no codec's name; ``auto``: whether "auto" is one here.

    Raises: CodecError: the message lists the names.
    """
    known = (*((AUTO,) if auto else ()), *lossless())
    if codec not in (*known, *LOSSY):
        listed = f"{', '.join(known)}, or lossy: {', '.join(LOSSY)}"
        raise CodecError(f"codec is one of {listed}, found {codec!r}; choose one of these")


def show_codec(codec: str) -> str:
    """The name of a codec for people: a lossy one says so wherever it appears."""
    return f"{codec} (lossy)" if codec in LOSSY else codec
