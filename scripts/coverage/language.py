"""Architectures of transformers, each as small as its configuration allows, some with labels and so with a
loss.

Attention is what the library chooses by itself; dropout stays on where an architecture has it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module, resources
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn

from .network import Batch, Network, normal, tokens

LABELS = (
    *("gpt2", "llama", "qwen3", "opt", "mixtral", "t5", "bart", "vit", "convnext"),
    *("bert", "roberta", "albert", "bert_classes", "bert_answers"),
)


def networks() -> Iterator[Network]:
    """Text, text to text, pictures, sound, and pictures with text; ``transformers.yaml`` has their sizes."""
    file = resources.files("penstock.scripts.coverage") / "transformers.yaml"
    table: Any = OmegaConf.to_container(OmegaConf.load(str(file)))
    shared = table["shared"]

    def sized(section: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for name, (kind, base, *own) in table[section].items():
            yield name, kind, {**shared.get(base, {}), **(own[0] if own else {})}

    for name, kind, options in sized("text"):
        yield _network(name, kind, options, functools.partial(_sentences, name))
    for name, kind, options in sized("pairs"):
        yield _network(name, kind, options, functools.partial(_pairs, name))
    for name, kind, options in sized("pictures"):
        pixels = options.get("image_size", 64)
        pixels = pixels if isinstance(pixels, int) else pixels[0]
        yield _network(name, kind, options, functools.partial(_pictures, name, pixels))
    text = {**shared["width"], "eos_token_id": 2, "bos_token_id": 1}
    both = {"text_config": text, "vision_config": shared["picture"], "projection_dim": 16}
    yield _network("clip_text", "CLIPTextModel", text, functools.partial(_sentences, "clip_text"))
    yield _network("clip", "CLIPModel", both, _both)
    for name, kind, options in sized("speech to text"):
        yield _network(name, kind, options, _heard)
    for name, kind, options in sized("sounds"):
        yield _network(name, kind, options, _sounds)
    for name, kind, options in sized("spectrograms"):
        yield _network(name, kind, options, _spectrograms)


def _network(name: str, kind: str, options: Mapping[str, Any], batch: Callable[[int], Batch]) -> Network:
    return Network(
        name=name, library="transformers", make=functools.partial(_made, kind, options), batch=batch
    )


def _made(kind: str, options: Mapping[str, Any]) -> nn.Module:
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()
    model = getattr(transformers, kind)
    options = dict(options)
    experts = options.pop("experts_implementation", None)
    config = model.config_class(**options)
    if experts:
        config._experts_implementation = experts
    return model(config).float()


def _sentences(name: str, samples: int) -> Batch:
    batch = {"input_ids": tokens(samples, samples, 12)}
    if name == "bert_answers":
        batch |= {
            "start_positions": tokens(1, samples, most=11),
            "end_positions": tokens(2, samples, most=11),
        }
    elif name == "bert_classes":
        batch["labels"] = torch.arange(samples) % 2
    elif name in LABELS:
        batch["labels"] = batch["input_ids"].clone()
    return batch


def _pairs(name: str, samples: int) -> Batch:
    batch = {"input_ids": tokens(samples, samples, 12)}
    batch["labels" if name in LABELS else "decoder_input_ids"] = tokens(samples + 1, samples, 7)
    return batch


def _pictures(name: str, pixels: int, samples: int) -> Batch:
    batch = {"pixel_values": normal(samples, samples, 3, pixels, pixels)}
    if name in LABELS:
        batch["labels"] = torch.arange(samples) % 2
    return batch


def _both(samples: int) -> Batch:
    return {"input_ids": tokens(samples, samples, 12), "pixel_values": normal(samples, samples, 3, 32, 32)}


def _heard(samples: int) -> Batch:
    return {
        "input_features": normal(samples, samples, 16, 32),
        "decoder_input_ids": tokens(samples, samples, 7),
    }


def _sounds(samples: int) -> Batch:
    return {"input_values": normal(samples, samples, 400)}


def _spectrograms(samples: int) -> Batch:
    return {"input_values": normal(samples, samples, 32, 16)}
