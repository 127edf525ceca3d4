"""Random images with random classes: a load of any size where no data set lies at hand.

Each image is drawn from its own number, so nothing is stored and every rank sees the same pixels."""

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...compression.errors import ConfigError
from .options import check_count, check_image
from .samples import Description, Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """One split: image i is normal noise drawn from (seed, split, i), and so is its class."""

    split: str
    num_samples: int
    num_classes: int
    shape: tuple[int, int, int]  # (channels, height, width)
    seed: int

    in_memory = True  # for measuring what else a step takes

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.num_samples:
            raise IndexError(index)
        digest = hashlib.blake2b(f"{self.seed}/{self.split}/{index}".encode(), digest_size=8).digest()
        source = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        target = torch.randint(self.num_classes, (), generator=source)
        return torch.randn(self.shape, generator=source), target


def load(
    *, num_samples: int = 1024, num_classes: int = 10, size: int = 64, channels: int = 3, seed: int = 0
) -> Samples:
    """Return random images to train on and a quarter as many to test; refuse numbers out of their range."""
    check_count(data__num_samples=num_samples, data__num_classes=num_classes)
    check_image(size=size, channels=channels)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ConfigError(f"data.seed={seed} must be a whole number")
    shape = (channels, size, size)
    train = Noise(split="train", num_samples=num_samples, num_classes=num_classes, shape=shape, seed=seed)
    return Samples(
        train=train,
        test=replace(train, split="test", num_samples=-(-num_samples // 4)),
        describe=Description(num_classes=num_classes, input_shape=shape),
    )
