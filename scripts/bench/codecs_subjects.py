"""The tensors that codecs are measured on, by class: random ones, and those of networks that have trained.

A bench on random numbers says how fast a codec is; only real tensors say what it saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compression.codec import encode
from ...compression.errors import ConfigError
from ...conf.bench_codecs import BenchCodecsConfig
from ...pipeline.pipeline import Pipeline
from ...pipeline.run import build
from ...pipeline.run.decide import decide, prepare
from ...pipeline.run.epochs import loss
from ...pipeline.run.run_length import training_batches
from ...pipeline.samples.samples import Samples
from ...pipeline.schedules.messages import Message
from ...stages.units import parse_bytes

_NETWORKS = {  # the modules whose outputs are taken; each ends in a ReLU
    "resnet18": ("relu", "layer1", "layer3"),
    "vgg11": ("features.1", "features.7", "features.14"),
}
_ACTIVATIONS = ("gelu", "relu", "relu2")
_TRANSFORMER = ("blocks.1.activation", "blocks.1")  # a hidden layer, and the residual stream
_BATCH = 64
_FASHION = {"_target_": "penstock.pipeline.samples.fashion_mnist.load"}
_DIGITS = {"_target_": "penstock.pipeline.samples.digits.load"}
_TEXT = {"_target_": "penstock.pipeline.samples.text.load"}


class Subject(NamedTuple):
    """A contiguous tensor, and the frame whose bitmap says where it matters, if there is one."""

    name: str
    tensor: Tensor
    mask: Tensor | None = None
    kind: str = ""  # the class, a key of ``CLASSES``


def subjects(config: BenchCodecsConfig) -> Iterator[Subject]:
    """The tensors of all classes that are asked for, one after another, so that few are held at a time."""
    for kind in config.classes:
        for subject in CLASSES[kind](config):
            yield subject._replace(kind=kind, tensor=subject.tensor.detach().contiguous())


def _synthetic(config: BenchCodecsConfig) -> Iterator[Subject]:
    """Normal numbers, and zeros in random places."""
    source = torch.Generator().manual_seed(config.seed)
    for dtype in _dtypes(config):
        for size in config.sizes:
            for density in config.densities:
                num_elements = parse_bytes(size, name="sizes") // dtype.itemsize
                values = torch.randn(num_elements, generator=source).to(dtype)
                dropped = torch.rand(num_elements, generator=source) >= density
                yield Subject(f"random, density {density:g}", values.masked_fill_(dropped, 0))


def _images(config: BenchCodecsConfig) -> Iterator[Subject]:
    """Activations behind ReLUs and their gradients, these with and without the activation's mask."""
    for network, paths in _NETWORKS.items():
        samples = _image_samples()
        options = {"_target_": "penstock.pipeline.models.torchvision", "name": network}
        kept = trained(config, samples, options, paths, _BATCH)
        yield from _with_masks(network, kept, paths, config)


def _text(config: BenchCodecsConfig) -> Iterator[Subject]:
    """Hidden layers and residual streams of small transformers, and their gradients."""
    samples = build.samples(_TEXT)
    for activation in _ACTIVATIONS:
        options = {"_target_": "penstock.pipeline.models.gpt", "activation": activation}
        kept = trained(config, samples, options, _TRANSFORMER, _BATCH)
        masked = _TRANSFORMER[:1] if activation == "relu" else ()
        yield from _with_masks(f"gpt {activation}", kept, masked, config)


def _with_masks(
    network: str, kept: dict[str, Tensor], masked: Sequence[str], config: BenchCodecsConfig
) -> Iterator[Subject]:
    """All tensors in all dtypes; gradients of ``masked`` modules also with the frame of the activation."""
    for name, tensor in kept.items():
        path, what = name.rsplit(" ", 1)
        for dtype in _dtypes(config):
            cast = tensor.to(dtype)
            yield Subject(f"{network} {name}", cast)
            if what == "gradient" and path in masked:
                mask = encode(kept[f"{path} activation"].to(dtype))
                yield Subject(f"{network} {name}, mask reused", cast, mask)


def _integers(config: BenchCodecsConfig) -> Iterator[Subject]:
    """Indices of a max-pool, tokens and labels, as torch makes them: int64."""
    wide, labels = _convolved(config, torch.Generator().manual_seed(config.seed))
    yield Subject("max-pool indices", F.max_pool2d(F.relu(wide), 2, return_indices=True)[1])
    yield Subject("tokens", next(_batches(config, build.samples(_TEXT), 512))[0])
    yield Subject("labels", labels)


def _masks(config: BenchCodecsConfig) -> Iterator[Subject]:
    """Booleans: where a ReLU passes, what a dropout keeps, what a causal attention sees."""
    source = torch.Generator().manual_seed(config.seed)
    yield Subject("ReLU mask", _convolved(config, source)[0] > 0)
    yield Subject("dropout mask, keeps 0.9", torch.rand(4 << 20, generator=source) < 0.9)
    yield Subject("causal mask", torch.ones(2048, 2048, dtype=torch.bool).tril())


def _convolved(config: BenchCodecsConfig, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """What a convolution makes of a batch of images, and their labels."""
    images, labels = next(_batches(config, _image_samples(), _BATCH))
    return F.conv2d(images, torch.randn(32, images.size(1), 3, 3, generator=source)), labels


def _job(config: BenchCodecsConfig) -> Iterator[Subject]:
    """What crosses the cuts of the configured job (model=, data=, cuts=, ...), micro-batch by micro-batch."""
    crossing = captured(config)
    torch.set_deterministic_debug_mode("default")  # a job's own setting
    for name, tensor in crossing.items():
        yield Subject(name, tensor)


CLASSES: dict[str, Callable[[BenchCodecsConfig], Iterator[Subject]]] = {
    "synthetic": _synthetic,
    "images": _images,
    "text": _text,
    "integers": _integers,
    "masks": _masks,
    "job": _job,
}


def trained(
    config: BenchCodecsConfig,
    samples: Samples,
    model: dict[str, str],
    paths: Sequence[str],
    batch: int = _BATCH,
) -> dict[str, Tensor]:
    """Train a network for ``config.capture_steps`` steps.

    Returns: outputs of the modules ``paths`` in the last step ("PATH activation"), and what came back to them
             ("PATH gradient"): (batch, ...) each.
    """
    network = build.model(model, describe=samples.describe, seed=config.seed)
    kept: dict[str, Tensor] = {}

    def keep(name: str, tensor: Tensor) -> None:
        kept[name] = tensor.detach().clone()  # what follows in place may change it

    def listen(path: str, output: Tensor) -> None:
        keep(f"{path} activation", output)
        output.register_hook(lambda gradient: keep(f"{path} gradient", gradient))

    for path in paths:
        network.get_submodule(path).register_forward_hook(lambda *call, path=path: listen(path, call[-1]))
    optimizer = build.optimizer(config.optimizer)(network.named_parameters())
    for inputs, targets in islice(cycle(_batches(config, samples, batch)), config.capture_steps):
        optimizer.zero_grad()
        loss(network(inputs.clone()), targets).backward()
        optimizer.step()
    return {name: kept[name] for path in paths for name in (f"{path} activation", f"{path} gradient")}


def captured(config: BenchCodecsConfig) -> dict[str, Tensor]:
    """Train the configured job in this process; return what crossed its cuts in its last micro-batch.

    Raises: PenstockError: the job cannot be planned.
    """
    samples, kept = prepare(config), {}
    plan = dataclasses.replace(decide(config, samples), codec="raw")
    network = build.model(config.model, describe=samples.describe, seed=config.seed)
    pipe = Pipeline(network, plan, loss=loss, optimizer=build.optimizer(config.optimizer), seed=config.seed)

    def leaving(message: Message, item: Tensor) -> None:
        if item.is_floating_point():
            what = "activation" if message.answers is None else "gradient"
            kept[f"{message.name} {what}"] = item.detach().clone()

    pipe.policy.observed, pipe.policy.leaving = lambda messages: max(messages.routes), leaving
    for batch in islice(cycle(training_batches(config, samples, epoch=0)), config.capture_steps):
        pipe.step(*batch)
    return kept


def _image_samples() -> Samples:
    """Fashion-MNIST where it is installed, else the digits that come with the package; 32 x 32."""
    try:
        return build.samples(_FASHION)
    except ConfigError:
        return build.samples(_DIGITS)


def _batches(config: BenchCodecsConfig, samples: Samples, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return samples.batches("train", batch_size=size, seed=config.seed)


def _dtypes(config: BenchCodecsConfig) -> list[torch.dtype]:
    return [getattr(torch, name) for name in config.dtypes]
