"""Zero-value compression first, another codec on the values that are left.

Half zeros make any other codec slow and its statistics worse; without them it sees half the bytes.

A payload: bitmap and offsets of zero_value as laid out in ``frame``, then the values as the other codec packs
them.
"""

from __future__ import annotations

import ctypes

from .dtypes import FLOATS
from .errors import CodecError
from .frame import sections
from .geometry import Words
from .pool import Scratch
from .raw import Codec, Packed
from .zero_value import SLACK, ZeroValue


def num_values_at(offsets: int, num_words: int) -> int:
    """What the last of the ``offsets`` of a zero_value payload says, if it can be.

    Raises: CodecError: more values than words.
    """
    last = offsets + 8 * (sections(num_words).num_blocks - 1)
    found = int.from_bytes(ctypes.string_at(last, 8), "little")
    if found > num_words:
        raise CodecError(f"{num_words} words have at most as many values, found {found}; it was damaged")
    return found


class Combined:
    """The codec ``inner`` behind zero_value; one of them alone where the other does not shrink."""

    def __init__(self, zero_value: ZeroValue, inner: Codec) -> None:
        """Pack by ``zero_value`` first, its values by ``inner``."""
        self.name, self.dtypes = f"{zero_value.name}+{inner.name}", FLOATS & inner.dtypes
        self._zero_value, self._inner = zero_value, inner
        self._values = Scratch()

    def max_bytes(self, num_words: int, bits: int) -> int:
        """Room that ``pack`` needs, in bytes."""
        return sections(num_words).values + self._inner.max_bytes(num_words, bits)

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        """Whether a payload of ``num_bytes`` can hold these words."""
        return sections(num_words).values < num_bytes < num_words * bits // 8

    def pack(self, words: Words, out: int) -> Packed:
        """Pack ``words`` to the address ``out``."""
        head, values = sections(words.num_words).values, self._values.address(words.num_bytes + SLACK)
        count = self._zero_value.pack_apart(words, out, values)
        if count is None:
            return self._inner.pack(words, out)
        codec, num_bytes = self._inner.pack(words._replace(address=values, num_words=count), out + head)
        # Values that the other codec leaves as they are make a payload of zero_value.
        return Packed(self.name if codec == self._inner.name else self._zero_value.name, head + num_bytes)

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        """Unpack the ``num_bytes`` bytes at the address ``payload`` to ``out``, and touch nothing else.

        Raises: CodecError: bitmap, offsets, values and length disagree.
        """
        parts = sections(out.num_words)
        count, rest = num_values_at(payload + parts.offsets, out.num_words), num_bytes - parts.values
        if not self._inner.fits(count, out.bits, rest):
            rule = f"the values of a {self.name} frame suit its offsets"
            raise CodecError(f"{rule}, found {rest} bytes for {count} values; it was damaged")
        values = self._values.address(out.num_bytes + SLACK)
        inner = out._replace(address=values, num_words=count)
        self._inner.unpack(payload + parts.values, rest, inner)
        self._zero_value.unpack_apart(payload, values, count, out)
