"""The 1,797 handwritten 8x8 digits that come with the package: real images without a download.

Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI (1998); see ``digits.txt``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from .images import Images
from .samples import Description, Samples


def load(*, size: int = 32, channels: int = 3) -> Samples:
    """Return the digits; every fifth one, the first included, is for the test (360 of 1,797).

    The file runs from writer to writer, so every fifth leaves each of them in both splits.
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        pixels, targets = torch.from_numpy(file["pixels"]), torch.from_numpy(file["targets"]).long()
    for_test = torch.arange(len(targets)) % 5 == 0

    def split(chosen: torch.Tensor) -> Images:
        return Images(
            pixels=pixels[chosen],
            targets=targets[chosen],
            size=size,
            channels=channels,
            white=16.0,
            mean=0.305,
            deviation=0.376,
        )

    return Samples(
        train=split(~for_test),
        test=split(for_test),
        describe=Description(num_classes=10, input_shape=(channels, size, size)),
    )
