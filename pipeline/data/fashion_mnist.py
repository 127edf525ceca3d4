"""Fashion-MNIST, read where it lies, plain (as torchvision has it) or gzipped (as Debian's package has it).

Source: Xiao, Rasul and Vollgraf, Fashion-MNIST, arXiv:1708.07747 (2017)."""

import gzip
import zlib
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ...compression.errors import ConfigError
from .digits import grey_images
from .options import DEBIAN_ROOT, find_fashion_mnist, plain_or_gzipped
from .samples import Samples


def load(*, root: str = DEBIAN_ROOT, size: int = 32, channels: int = 3) -> Samples:
    """Return Fashion-MNIST (60,000 and 10,000 images of 28x28) from ``root``.

    Args:   root: holds ``FashionMNIST/raw`` as torchvision lays it out, or the four idx files themselves.
    Raises: ConfigError: a file is missing or damaged."""
    folder = find_fashion_mnist(root)

    def split(stem: str) -> tuple[Tensor, Tensor]:
        pixels = read_idx(plain_or_gzipped(folder, f"{stem}-images-idx3-ubyte"), num_dims=3)
        targets = read_idx(plain_or_gzipped(folder, f"{stem}-labels-idx1-ubyte"), num_dims=1)
        if len(pixels) != len(targets) or int(targets.max()) > 9:
            raise ConfigError(f"{folder} holds {stem} images and labels that do not belong together")
        return pixels, targets.long()

    scale = {"white": 255.0, "mean": 0.286, "deviation": 0.353}
    return grey_images(split("train"), split("t10k"), size=size, channels=channels, **scale)


def read_idx(path: Path, *, num_dims: int) -> Tensor:
    """Return the uint8 tensor of an idx file, plain or gzipped.

    Raises: ConfigError: the file is not a whole idx file of bytes with ``num_dims`` dimensions.
    Source: http://yann.lecun.com/exdb/mnist/: 0, 0, type (8: byte), dimensions, then sizes, u32 big-endian.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read ({error}); fetch it again") from error
    start = 4 + 4 * num_dims
    sizes = [int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4)]
    if data[:4] != bytes([0, 0, 8, num_dims]) or len(data) != start + prod(sizes) or 0 in sizes:
        raise ConfigError(f"{path} is not a whole idx file of {num_dims} dimensions; fetch it again")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).view(sizes)
