"""Small grey images in memory, and the 1,797 handwritten 8x8 digits that come with the package.

Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI (1998); see ``digits.txt``."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...stages.meta_watch import META
from .options import check_image
from .samples import Description, Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """One split of grey images, kept as bytes, and resized and normalised a batch at a time."""

    pixels: Tensor  # uint8, (samples, height, width)
    targets: Tensor  # int64, (samples,)
    size: int  # height and width of what the network sees
    channels: int  # how often the grey value is repeated; torchvision's networks take 3
    white: float  # the pixel value that counts as 1
    mean: float  # of the train split's pixels / white
    deviation: float

    in_memory = True

    def __post_init__(self) -> None:
        check_image(size=self.size, channels=self.channels)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.resized(self.pixels[index, None])[0], self.targets[index]

    def inputs_of(self, indices: Tensor) -> Tensor:
        """Return float32 images (batch, channels, size, size)."""
        return self.resized(self.pixels[indices])

    def targets_of(self, indices: Tensor) -> Tensor:
        """Return int64 targets."""
        return self.targets[indices]

    def form(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a batch of so many images without memory."""
        shape = (number, self.channels, self.size, self.size)
        return torch.empty(shape, device=META), self.targets.new_empty(number, device=META)

    def resized(self, pixels: Tensor) -> Tensor:
        """Return uint8 pixels (batch, height, width) as normalised inputs (batch, channels, size, size)."""
        normal = (pixels.unsqueeze(1).float() / self.white - self.mean) / self.deviation
        if normal.shape[2:] != (self.size, self.size):
            normal = F.interpolate(normal, size=(self.size, self.size), mode="bilinear", align_corners=False)
        return normal.repeat(1, self.channels, 1, 1)


def grey_images(
    train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], *, size: int, channels: int, **scale: float
) -> Samples:
    """Return two splits of pixels and targets in ten classes; ``scale``: the last three of ``Images``."""
    images = [Images(pixels=x, targets=y, size=size, channels=channels, **scale) for x, y in (train, test)]
    describe = Description(num_classes=10, input_shape=(channels, size, size))
    return Samples(train=images[0], test=images[1], describe=describe)


def load(*, size: int = 32, channels: int = 3) -> Samples:
    """Return the digits; every fifth one, the first included, is for the test (360 of 1,797).

    The file runs from writer to writer, so every fifth leaves each of them in both splits."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        pixels, targets = torch.from_numpy(file["pixels"]), torch.from_numpy(file["targets"]).long()
    for_test = torch.arange(len(targets)) % 5 == 0
    train, test = ((pixels[chosen], targets[chosen]) for chosen in (~for_test, for_test))
    return grey_images(train, test, size=size, channels=channels, white=16.0, mean=0.305, deviation=0.376)
