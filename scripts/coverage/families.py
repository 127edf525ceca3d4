"""One network of every family of timm: the smallest, at the smallest pictures that it takes.

A family is a module of ``timm.models``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from network import Batch, Network, normal, table
from torch import nn

PIXELS = (64, 96, 128, 192, 224, 256)


def networks() -> Iterator[Network]:
    """One network of every family."""
    timm, smallest = import_module("timm"), table()["timm"]
    for module in sorted(timm.list_modules()):
        members = sorted(timm.list_models(module=module))
        for name in ([name for name in members if name in smallest] or members)[:1]:
            family = Family(name)
            yield Network(name=name, library="timm", make=family.make, batch=family.batch)


class Family:
    """A network of timm and the size of its pictures, which is found when it is made."""

    def __init__(self, name: str) -> None:
        self.name, self.pixels = name, 0

    def make(self) -> nn.Module:
        """The network, for the smallest pictures with which it runs; dropout where it can be asked for."""
        for pixels in PIXELS:
            with contextlib.suppress(Exception):
                self._build(pixels).eval()(self._pictures(2, pixels))
                break
        else:
            pixels = int(self._pretrained.input_size[-1])
        self.pixels = pixels
        torch.manual_seed(0)
        return self._build(pixels)

    def batch(self, samples: int) -> Batch:
        """Pictures."""
        return {"x": self._pictures(samples, self.pixels)}

    def _build(self, pixels: int) -> nn.Module:
        timm = import_module("timm")
        tries = [{"img_size": pixels, "drop_path_rate": 0.1}, {"img_size": pixels}, {"drop_path_rate": 0.1}]
        for options in tries if pixels else ():
            with contextlib.suppress(Exception):
                return timm.create_model(self.name, num_classes=10, **options)
        return timm.create_model(self.name, num_classes=10)

    @functools.cached_property
    def _pretrained(self) -> Any:
        return import_module("timm").models.get_pretrained_cfg(self.name)

    def _pictures(self, samples: int, pixels: int) -> torch.Tensor:
        return normal(samples, samples, int(self._pretrained.input_size[0]), pixels, pixels)
