"""All networks of torchvision, networks of torch itself, and the families of timm."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from language import SECOND, Batch, Network, normal, table, tokens
from torch import nn
from torchvision import models

SIZES = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 28}  # pixels, where 64 do not do
OPTIONS: dict[str, dict[str, Any]] = {
    "inception_v3": {"init_weights": False},
    "googlenet": {"init_weights": False},
    "vit_h_14": {"image_size": 28},
    **{name: {"image_size": 64} for name in ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32")},
}
GIANTS = {"regnet_y_128gf": 32, "vit_h_14": 32, "vit_l_16": 16, "vit_l_32": 16}
"""GiB of memory that a dozen copies (traced, measured, trained, plain, their gradients) take."""


def networks() -> Iterator[Network]:
    """Classification, segmentation and video, smallest inputs that the architecture takes."""
    for name in models.list_models(module=models):
        yield _network(name, _images, SIZES.get(name, 64), **OPTIONS.get(name, {}))
    for name in models.list_models(module=models.segmentation):
        own = {} if "lraspp" in name else {"aux_loss": True}
        yield _network(name, _images, 64, weights_backbone=None, **own)
    for name in models.list_models(module=models.video):
        sizes = (16, 224) if "mvit" in name else (14, 224) if name == "s3d" else (4, 32)
        yield _network(name, _videos, *sizes)


def _network(name: str, batch: Callable[..., Batch], *sizes: int, **options: Any) -> Network:
    needed, there = GIANTS.get(name, 0), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    skip = f"takes {needed} GiB of memory, there are {there:.0f}" if needed > there else ""
    make = functools.partial(models.get_model, name, weights=None, **options)
    batch = functools.partial(batch, *sizes)
    return Network(name=name, library="torchvision", make=make, batch=batch, skip=skip)


def _images(pixels: int, samples: int, *, second: bool = False) -> Batch:
    return {"x": normal(samples, samples, 3, *[pixels + SECOND * second] * 2)}


def _videos(frames: int, pixels: int, samples: int, *, second: bool = False) -> Batch:
    return {"x": normal(samples, samples, 3, frames, *[pixels + SECOND * second] * 2)}


class Recurrent(nn.Module):
    """Two recurrent layers, and a classifier behind the last step."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(97, 16)
        self.first = kind(16, 24, 1, batch_first=True)
        self.second = kind(24, 24, 1, batch_first=True)
        self.head = nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores of token sequences."""
        x, _ = self.first(self.embedding(x))
        return self.head(self.second(x)[0][:, -1])


class PackedRecurrent(Recurrent):
    """The same over sequences of several lengths, packed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Class scores of token sequences, the second of which is shorter."""
        lengths = torch.tensor([x.shape[1]] * (len(x) - 1) + [x.shape[1] - 3])
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(x), lengths, batch_first=True)
        _, state = self.first(packed)
        hidden = state[0] if isinstance(state, tuple) else state
        return self.head(hidden[-1])


class Experts(nn.Module):
    """A mixture of experts: every token goes to the best of four, chosen by value."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        expert = lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))  # noqa: E731
        self.experts = nn.ModuleList(expert() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of any shape, each through its expert."""
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            where = (chosen == number).nonzero()[:, 0]
            if len(where):
                out = out.index_add(0, where, expert(flat[where]) * weights[where, None])
        return out.view_as(x)


def of_torch() -> Iterator[Network]:
    """Networks out of torch.nn alone."""
    encoder = functools.partial(nn.TransformerEncoderLayer, 16, 4, 32)

    def sentences(n: int, *, second: bool = False) -> Batch:
        return {"x": tokens(n, n, 12 - 3 * second)}

    def vectors(n: int, *, second: bool = False) -> Batch:
        return {"x": normal(n, n, 12 - 3 * second, 16)}

    def pairs(n: int, *, second: bool = False) -> Batch:
        return {"src": normal(n, n, 12 - 3 * second, 16), "tgt": normal(n + 1, n, 7 - 2 * second, 16)}

    def time_first() -> nn.Module:
        return nn.Sequential(nn.TransformerEncoder(encoder(), 3, enable_nested_tensor=False))

    def experts() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 16), Experts(), nn.Linear(16, 16), Experts(), nn.Linear(16, 4))

    made: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch]]] = {
        "lstm": (lambda: Recurrent(nn.LSTM), sentences),
        "gru": (lambda: Recurrent(nn.GRU), sentences),
        "lstm_packed": (lambda: PackedRecurrent(nn.LSTM), sentences),
        "transformer_encoder": (lambda: nn.TransformerEncoder(encoder(batch_first=True), 3), vectors),
        "transformer_encoder_time_first": (time_first, vectors),
        "experts": (experts, vectors),
        "transformer": (lambda: nn.Transformer(16, 4, 2, 2, 32, batch_first=True), pairs),
    }
    for name, (make, batch) in made.items():
        yield Network(name=name, library="torch", make=make, batch=batch)


PIXELS = (64, 96, 128, 192, 224, 256)


def of_timm() -> Iterator[Network]:
    """The smallest network of every module of ``timm.models``, at the smallest pictures that it takes."""
    timm, smallest = import_module("timm"), table()["timm"]
    for module in sorted(timm.list_modules()):
        members = sorted(timm.list_models(module=module))
        for name in ([name for name in members if name in smallest] or members)[:1]:
            family = Family(name)
            yield Network(name=name, library="timm", make=family.make, batch=family.batch)


class Family:
    """A network of timm and the size of its pictures, which is found when it is made."""

    def __init__(self, name: str) -> None:
        self.name, self.channels, self.pixels = name, 3, 224

    def make(self) -> nn.Module:
        """The network, for the smallest pictures with which it runs; dropout where it can be asked for."""
        size = import_module("timm").models.get_pretrained_cfg(self.name).input_size
        self.channels, self.pixels = int(size[0]), int(size[-1])
        for pixels in PIXELS:
            with contextlib.suppress(Exception):
                self._build(pixels).eval()(normal(2, 2, self.channels, pixels, pixels))
                self.pixels = pixels
                break
        torch.manual_seed(0)
        return self._build(self.pixels)

    def batch(self, samples: int, *, second: bool = False) -> Batch:
        """Pictures."""
        return {"x": normal(samples, samples, self.channels, *[self.pixels + SECOND * second] * 2)}

    def _build(self, pixels: int) -> nn.Module:
        timm = import_module("timm")
        tries = [{"img_size": pixels, "drop_path_rate": 0.1}, {"img_size": pixels}, {"drop_path_rate": 0.1}]
        for options in tries:
            with contextlib.suppress(Exception):
                return timm.create_model(self.name, num_classes=10, **options)
        return timm.create_model(self.name, num_classes=10)
