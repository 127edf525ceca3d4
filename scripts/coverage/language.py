"""A public network to try, how to make it small, and a batch for it; and the architectures of transformers,
each as small as its configuration allows, some with labels and so with a loss.

Attention is what the library chooses by itself; dropout stays on where an architecture has it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

Batch = Mapping[str, torch.Tensor]
Inputs = tuple[torch.Tensor, ...] | dict[str, torch.Tensor]
SECOND = 32  # more pixels a side of the pictures of a second size
MASKS = {
    "input_ids": "attention_mask",
    "input_values": "attention_mask",
    "decoder_input_ids": "decoder_attention_mask",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """``make()`` builds it, with random weights; ``batch(n)`` is n samples by name, one that is called x by
    position, ``batch(n, second=True)`` those of another length or size; ``skip`` says why it is not tried
    here."""

    name: str
    library: str
    make: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    skip: str = ""

    @property
    def full_name(self) -> str:
        """Library and name: what rows are known by."""
        return f"{self.library}/{self.name}"


def given(batch: Batch) -> Inputs:
    """Arguments of a model: copies, by name, or by position where the one input is called x."""
    copies = {name: x.clone() for name, x in batch.items()}
    return tuple(copies.values()) if tuple(batch) == ("x",) else copies


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Normal numbers, the same for one seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int, *shape: int, most: int = 97) -> torch.Tensor:
    """Tokens from 3 up to ``most``, so that none is a padding."""
    return torch.randint(3, most, shape, generator=torch.Generator().manual_seed(seed))


def masked(batch: Batch, *, padded: bool) -> Batch:
    """A batch with the masks of its sequences; ``padded``: all but every fourth end early, by more and more,
    and no label counts behind the end."""
    result = dict(batch)
    for name, x in batch.items():
        if x.dim() == 2:
            length = x.shape[1]
            ends = length - padded * (torch.arange(len(x)) % 4) * (length // 5)
            inside = torch.arange(length) < ends[:, None]
            result[name] = x.where(inside, -100 if name == "labels" else 0)
            result |= {MASKS[name]: inside.long()} if name in MASKS else {}
    return result


def table() -> dict[str, Any]:
    """Networks that ``networks.yaml`` lists."""
    return yaml.safe_load(Path(__file__).with_name("networks.yaml").read_text())


INPUTS: dict[str, Callable[[int, int, bool], Batch]] = {
    "text": lambda n, pixels, second: {"input_ids": tokens(n, n, 12 - 3 * second)},
    "pairs": lambda n, pixels, second: {"input_ids": tokens(n, n, 12 - 3 * second)},
    "pictures": lambda n, pixels, second: {"pixel_values": normal(n, n, 3, pixels, pixels)},
    "pictures with text": lambda n, _, second: {
        "input_ids": tokens(n, n, 12 - 3 * second),
        "pixel_values": normal(n, n, 3, 32, 32),
    },
    "speech to text": lambda n, _, second: {
        "input_features": normal(n, n, 16, 32),  # Whisper takes no other length
        "decoder_input_ids": tokens(n, n, 7 - 2 * second),
    },
    "sounds": lambda n, pixels, second: {"input_values": normal(n, n, 400 + 160 * second)},
    "spectrograms": lambda n, pixels, second: {"input_values": normal(n, n, 32 + 16 * second, 16)},
}
"""For each section of ``networks.yaml`` n samples, pictures of so many pixels a side; ``second``: of a second
length."""


def networks() -> Iterator[Network]:
    """Text, text to text, pictures, sound, and pictures with text; ``networks.yaml`` has their sizes."""
    listed = table()
    for section in INPUTS:
        for name, (kind, base, *own) in listed[section].items():
            options = {**listed["shared"].get(base, {}), **(own[0] if own else {})}
            labelled, size = name in listed["labels"], options.get("image_size", 64)
            batch = functools.partial(_batch, section, name, labelled, size)
            make = functools.partial(_build, kind, options)
            yield Network(name=name, library="transformers", make=make, batch=batch)


def adapters() -> Iterator[Network]:
    """LoRA of peft on some of these: their own weights are frozen."""
    for one in networks():
        if one.name in table()["adapters"]:
            make = functools.partial(_adapted, one.make)
            yield dataclasses.replace(one, name=f"lora_{one.name}", library="peft", make=make)


def _adapted(make: Callable[[], nn.Module]) -> nn.Module:
    peft = import_module("peft")
    return peft.get_peft_model(make(), peft.LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"))


def _build(kind: str, options: Mapping[str, Any]) -> nn.Module:
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()
    model, options = getattr(transformers, kind), dict(options)
    experts = options.pop("experts_implementation", None)
    config = model.config_class(**options)
    if experts:
        config._experts_implementation = experts
    return model(config).float()


def _batch(
    section: str, name: str, labelled: bool, size: int | list[int], samples: int, *, second: bool = False
) -> Batch:
    pixels = (size if isinstance(size, int) else size[0]) + SECOND * second
    batch = dict(INPUTS[section](samples, pixels, second))
    if section == "pairs":
        batch["labels" if labelled else "decoder_input_ids"] = tokens(samples + 1, samples, 7 - 2 * second)
    elif name == "bert_answers":
        batch["start_positions"] = tokens(1, samples, most=11 - 3 * second)
        batch["end_positions"] = tokens(2, samples, most=11 - 3 * second)
    elif labelled:
        classes = section == "pictures" or name == "bert_classes"
        batch["labels"] = torch.arange(samples) % 2 if classes else batch["input_ids"].clone()
    return batch
