"""The data sets by name; a user's own is any callable that returns a ``Samples``."""

from __future__ import annotations

from collections.abc import Callable

from . import digits, fake, fashion_mnist, image_folder, text
from .samples import Description, Samples

__all__ = ["SAMPLES", "Description", "Samples"]

SAMPLES: dict[str, Callable[..., Samples]] = {
    "digits": digits.load,
    "fake": fake.load,
    "fashion_mnist": fashion_mnist.load,
    "image_folder": image_folder.load,
    "text": text.load,
}
