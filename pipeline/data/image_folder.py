"""Images in folders, one folder a class, as torchvision's ImageFolder reads them: one's own data set.

Files are listed once and decoded when asked for, so a data set may be larger than the memory."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...compression.errors import ConfigError
from ...stages.meta_watch import META
from .options import check_image, check_known, find_image_folder, no_images
from .samples import Description, Samples

if TYPE_CHECKING:
    from torchvision.datasets import ImageFolder

SCALES = {3: ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), 1: ((0.449,), (0.226,))}
"""Mean and deviation by channels, of ImageNet's red, green and blue as published weights expect, or grey."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """One split: the files that torchvision listed, decoded, resized and normalised when asked for."""

    folder: ImageFolder
    size: int
    channels: int
    through: Callable[[list[int]], list[bytes]] | None = None  # reads several files at once, if not ``read``

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.decode(index, self.read(index)), torch.tensor(self.folder.targets[index])

    def inputs_of(self, indices: Tensor) -> Tensor:
        """Return float32 images (batch, channels, size, size)."""
        numbers = indices.tolist()
        files = map(self.read, numbers) if self.through is None else self.through(numbers)
        return torch.stack([self.decode(*one) for one in zip(numbers, files, strict=True)])

    def targets_of(self, indices: Tensor) -> Tensor:
        """Return their int64 classes, for which no file is opened."""
        return torch.tensor([self.folder.targets[index] for index in indices.tolist()])

    def form(self, number: int) -> tuple[Tensor, Tensor]:
        """Return a batch of so many images without memory."""
        shape = (number, self.channels, self.size, self.size)
        return torch.empty(shape, device=META), torch.empty(number, dtype=torch.int64, device=META)

    def path(self, index: int) -> str:
        """Return the file of an image."""
        return self.folder.samples[index][0]

    def read(self, index: int) -> bytes:
        """Return the bytes of an image's file; raises ConfigError where it cannot be read."""
        try:
            return Path(self.path(index)).read_bytes()
        except OSError as error:
            raise _no_image(self.path(index), error) from error

    def decode(self, index: int, data: bytes) -> Tensor:
        """Return the image in ``data``, resized and normalised; raises ConfigError where it is none."""
        import numpy as np
        from PIL import Image

        try:
            with Image.open(io.BytesIO(data)) as file:
                image = file.convert("RGB" if self.channels == 3 else "L")
                image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            raise _no_image(self.path(index), error) from error
        pixels = torch.from_numpy(np.array(image)).view(self.size, self.size, self.channels)
        mean, deviation = (torch.tensor(values).view(-1, 1, 1) for values in SCALES[self.channels])
        return (pixels.permute(2, 0, 1).float() / 255 - mean).div(deviation).contiguous()


def load(*, root: str, size: int = 64, channels: int = 3) -> Samples:
    """Return the images in ``root/train/CLASS`` and ``root/val/CLASS`` (or ``root/test/CLASS``).

    Args:   size: height and width that every image is stretched to; channels: 3 for colours, 1 for grey.
    Raises: ConfigError: a folder is missing or has no images, or the splits have other classes. When an
            image is asked for: it cannot be decoded."""
    check_image(size=size)
    check_known("data.channels", channels, (1, 3))
    from torchvision.datasets import ImageFolder

    splits = []
    for folder in find_image_folder(root):
        try:
            splits.append(ImageFolder(str(folder)))
        except OSError as error:  # torchvision's for no folder, no class, a class without images
            raise no_images(root, folder, str(error).splitlines()[0]) from error
    train, test = splits
    if train.classes != test.classes:
        odd = sorted({*train.classes} ^ {*test.classes})
        raise ConfigError(
            f"data.root={root} has the class {odd[0]} in one split only; give both splits its images"
        )
    return Samples(
        train=Files(folder=train, size=size, channels=channels),
        test=Files(folder=test, size=size, channels=channels),
        describe=Description(num_classes=len(train.classes), input_shape=(channels, size, size)),
    )


def _no_image(path: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())
    return ConfigError(f"{path} is not an image that can be read ({reason}); remove it")
