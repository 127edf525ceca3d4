"""Real lifetimes: every storage of a forward and its backward, placed within 2 % of what lives at once."""

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import torchvision
from test_arena import max_live, peak
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.stages.memory.arena import place

NETWORKS = ["resnet18", "resnet50", "vgg11_bn", "densenet121", "mobilenet_v3_small", "gpt"]


class Gpt(nn.Module):
    """A small transformer over tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.embed, self.layers = (
            nn.Embedding(97, 64),
            nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
        )
        self.head = nn.Linear(64, 97)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, 97) for int64 tokens (batch, length)."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embed(tokens), mask=mask, is_causal=True))


class Lifetimes(TorchDispatchMode):
    """Notes when each storage that is made inside came and went, in operations."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.known = itertools.count(1), dict[int, list[int]]()
        self.found: list[list[int]] = []

    def _went(self, key: int) -> None:
        self.known.pop(key)[1] = next(self.time)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        out = func(*args, **kwargs or {})
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known and storage._cdata not in known and storage.nbytes():
                    taken = [next(self.time), 0, storage.nbytes()]
                    self.known[storage._cdata] = taken
                    self.found.append(taken)
                    weakref.finalize(storage, self._went, storage._cdata)
        return out

    def buffers(self) -> list[tuple[int, int, int]]:
        """(lower, upper, size) of each, ``upper`` exclusive."""
        end = next(self.time) + 1
        return [(low, up or end, size) for low, up, size in self.found]


def buffers_of(name: str) -> list[tuple[int, int, int]]:
    """The buffers of a forward and its backward of a network of torchvision, or of ``gpt``."""
    torch.manual_seed(0)
    if name == "gpt":
        model, given = Gpt(), torch.randint(0, 97, (4, 32))
    else:
        model, given = torchvision.models.get_model(name, weights=None), torch.randn(2, 3, 64, 64)
    gc.collect()
    with Lifetimes() as lifetimes:
        model(given).float().pow(2).mean().backward()
    return lifetimes.buffers()


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_of_a_network_is_laid_close_to_what_lives_at_once(name: str) -> None:
    buffers = buffers_of(name)
    live, high = max_live(buffers), peak(buffers, place(buffers))
    print(
        f"{name}: {len(buffers)} buffers, {live} bytes at once, laid in {high} ({high / live - 1:.3%} more)"
    )
    assert len(buffers) > 100
    assert high <= 1.02 * live
