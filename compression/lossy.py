"""Codecs that lose bits: floats in one or two bytes, only for those who ask for them by name.

None of them keeps the promise of the same bits, so none is in ``CODECS`` and ``auto`` never takes one; each
says in its docstring how far a word can be off. Integers, complex numbers and what would not shrink go raw.

In one byte, blocks of 1,024 words are each divided by a scale of their own, which costs 0.4 %; one scale for
a whole tensor would lose its small blocks. A payload, little-endian::

    scales   f32 per block, a NaN where the block travels as it is; zeros up to a multiple of 64 bytes
    codes    a byte per word, zeros up to a multiple of 64 bytes
    words    the blocks that travel as they are, one after another
"""

import ctypes
from abc import abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .errors import CodecError
from .frame import ON_REQUEST, aligned
from .geometry import Words
from .raw import Codec, Packed, Raw

BLOCK = 1024  # words of one scale
_CHUNK = 32 * BLOCK  # words at once: what is calculated between them stays in the cache
_LEAST_SCALE = 2.0**-126  # smaller ones are denormal, and would scale inexactly
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _chunks(words: Words) -> Iterator[tuple[slice, slice]]:
    """Yield the words to take at once, and the places of their bytes."""
    for first in range(0, words.num_words, _CHUNK):
        end = min(words.num_words, first + _CHUNK)
        yield slice(first, end), slice(first * words.bits // 8, end * words.bits // 8)


class ScaledBlocks(Codec):
    """Blocks of 1,024 words, each divided by a scale of its own, in a byte per word.

    A subclass gives the scale of blocks whose largest absolute words are ``largest``, all in float64, codes
    scaled words as a byte each, and decodes these in float32.
    """

    dtypes = ON_REQUEST

    @abstractmethod
    def _scale(self, largest: Tensor) -> Tensor: ...
    @abstractmethod
    def _coded(self, scaled: Tensor) -> Tensor: ...
    @abstractmethod
    def _decoded(self, codes: Tensor) -> Tensor: ...

    def max_bytes(self, num_words: int, bits: int) -> int:
        return _plain_at(num_words) + num_words * bits // 8

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        plain = _plain_at(num_words)
        return bits > 8 and plain <= num_bytes < num_words * bits // 8 and (num_bytes - plain) * 8 % bits == 0

    def pack(self, words: Words, out: int) -> Packed:
        end = _plain_at(words.num_words)
        if words.dtype not in _FLOATS or end >= words.num_bytes:
            return Raw().pack(words, out)
        source, block_bytes = _bytes(words.address, words.num_bytes), BLOCK * words.bits // 8
        ctypes.memset(out, 0, end)
        scales, codes = _sections(out, words.num_words)
        for chunk, part in _chunks(words):
            blocks = _blocks(source[part], words.dtype)
            largest = blocks.abs().amax(1).double()
            scale = self._scale(largest).clamp(min=_LEAST_SCALE).float()
            is_plain = ~(largest.isfinite() & scale.isfinite())
            scaled = blocks / scale.to(blocks.dtype)[:, None]
            coded = self._coded(scaled.masked_fill_(is_plain[:, None], 0))
            codes[chunk] = coded.view(-1)[: chunk.stop - chunk.start]
            scales[chunk.start // BLOCK :][: len(scale)] = scale.masked_fill_(is_plain, torch.nan)
        for block in torch.nonzero(scales.isnan()).view(-1).tolist():
            piece = source[block * block_bytes :][:block_bytes]
            if end + len(piece) >= words.num_bytes:
                return Raw().pack(words, out)
            _bytes(out + end, len(piece)).copy_(piece)
            end += len(piece)
        return Packed(self.name, end)

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        if out.dtype not in _FLOATS:
            raise CodecError(f"a {self.name} frame holds floats, found {out.dtype}; it was damaged")
        scales, codes = _sections(payload, out.num_words)
        plain = torch.nonzero(scales.isnan()).view(-1).tolist()
        end, block_bytes = _plain_at(out.num_words), BLOCK * out.bits // 8
        lengths = [min(block_bytes, out.num_bytes - block * block_bytes) for block in plain]
        sound = scales.isnan() | ((scales >= _LEAST_SCALE) & scales.isfinite())
        if not sound.all() or end + sum(lengths) != num_bytes:
            rule = f"a {self.name} frame of {num_bytes} bytes has a scale or the words of every block"
            raise CodecError(f"{rule}, found {len(plain)} blocks without a scale; it was damaged")
        target, most = _bytes(out.address, out.num_bytes), torch.finfo(out.dtype).max
        for chunk, part in _chunks(out):
            blocks = _blocks(codes[chunk], torch.uint8)
            scale = scales[chunk.start // BLOCK :][: len(blocks), None]
            wide = torch.float64 if out.bits == 64 else torch.float32
            words = (self._decoded(blocks).to(wide) * scale.to(wide)).clamp_(-most, most).to(out.dtype)
            target[part] = words.view(-1).view(torch.uint8)[: part.stop - part.start]
        for block, length in zip(plain, lengths, strict=True):
            target[block * block_bytes :][:length] = _bytes(payload + end, length)
            end += length


class Fp8(ScaledBlocks):
    """Floats of 16 to 64 bits as float8_e4m3fn, 1,024 words to a scale.

    The scale is the least power of two from 2**-126 on that brings the block's largest word to at most 448.

    Error: at most 2**-4 of the word (float64: 2**-24 of it more) or 2**-10 of the scale, whichever is more;
    the scale is at most 1/224 of the block's largest word, or 2**-126; then the word is rounded to its dtype.
    Zeros keep their sign. A block with an infinity, a NaN, or a word beyond 448 * 2**127 travels as it is.
    """

    name = "fp8"

    def _scale(self, largest: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(largest / 448)
        return torch.ldexp(torch.ones_like(largest), exponent - (mantissa == 0.5).int())

    def _coded(self, scaled: Tensor) -> Tensor:
        return scaled.float().to(torch.float8_e4m3fn).view(torch.uint8)

    def _decoded(self, codes: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).float()


class Int8(ScaledBlocks):
    """Floats of 16 to 64 bits as integers from -127 to 127, 1,024 words to a scale.

    The scale is the block's largest word divided by 127, in float32, and at least 2**-126.

    Error: at most half the scale, which is 1/254 of the block's largest word, or 2**-127, and 2**-14 of that;
    then the word is rounded to its dtype. Zeros lose their sign. A block with an infinity, a NaN, or a word
    of more than 127 times the largest float32 travels as it is.
    """

    name = "int8"

    def _scale(self, largest: Tensor) -> Tensor:
        return largest / 127

    def _coded(self, scaled: Tensor) -> Tensor:
        return scaled.round().to(torch.int8).view(torch.uint8)

    def _decoded(self, codes: Tensor) -> Tensor:
        return codes.view(torch.int8).float()


def _bytes(address: int, num_bytes: int) -> Tensor:
    return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address)))


def _plain_at(num_words: int) -> int:
    return aligned(4 * -(-num_words // BLOCK)) + aligned(num_words)


def _sections(payload: int, num_words: int) -> tuple[Tensor, Tensor]:
    """Scales and codes."""
    num_blocks = -(-num_words // BLOCK)
    scales = _bytes(payload, 4 * num_blocks).view(torch.float32)
    return scales, _bytes(payload + aligned(4 * num_blocks), num_words)


def _blocks(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as blocks of words that can be calculated with (or of bytes); zeros fill the last."""
    words = part.view(dtype)
    if rest := -len(words) % BLOCK:
        words = torch.cat([words, words.new_zeros(rest)])
    words = words.view(-1, BLOCK)
    return words.float() if dtype in (torch.float16, torch.bfloat16) else words


class Bf16(Codec):
    """Rounds float32 and float64 to bfloat16, to nearest, ties to even.

    Error: at most 2**-8 of the word where it is normal (at least 2**-126), at most 2**-134 below. From
    2**128 - 2**119 on a word becomes an infinity; infinities and zeros keep their sign, a NaN stays some NaN.
    """

    name, dtypes = "bf16", ON_REQUEST

    def fits(self, num_words: int, bits: int, num_bytes: int) -> bool:
        return bits >= 32 and num_words > 0 and num_bytes == 2 * num_words

    def pack(self, words: Words, out: int) -> Packed:
        if words.dtype not in (torch.float32, torch.float64) or not words.num_words:
            return Raw().pack(words, out)
        source = _bytes(words.address, words.num_bytes).view(words.dtype)
        rounded = _bytes(out, 2 * words.num_words).view(torch.bfloat16)
        for chunk, _ in _chunks(words):
            part = _to_odd(source[chunk]) if words.bits == 64 else source[chunk]
            rounded[chunk] = part
            nan = part.isnan()  # torch's NaN is another one from CPU to CPU: keep the payload, made quiet
            if nan.any():
                quiet = (part.view(torch.int32) >> 16 | 0x40).short()
                rounded[chunk] = torch.where(nan, quiet.view(torch.bfloat16), rounded[chunk])
        return Packed(self.name, 2 * words.num_words)

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        if out.dtype not in (torch.float32, torch.float64):
            raise CodecError(f"a bf16 frame holds float32 or float64, found {out.dtype}; it was damaged")
        rounded = _bytes(payload, num_bytes).view(torch.bfloat16)
        _bytes(out.address, out.num_bytes).view(out.dtype).copy_(rounded)


def _to_odd(words: Tensor) -> Tensor:
    """Cut float64 to float32, the last bit set where that lost something: so bfloat16 is rounded to once."""
    nearest = words.float()
    wide = nearest.double()
    bits = nearest.view(torch.int32) - (wide.abs() > words.abs()).int()
    return (bits | (wide != words).int()).view(torch.float32)


LOSSY_CODECS: dict[str, Bf16 | Fp8 | Int8] = {codec.name: codec for codec in (Bf16(), Fp8(), Int8())}
