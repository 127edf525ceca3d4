"""The networks by name: torchvision's for images, an mlp, and a small decoder-only transformer for text.

All of them trace at any batch size, in many small layers: no choice by value, no numbers made of shapes.
"""

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from math import prod, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..compression.errors import ConfigError
from .data.options import check_count, check_known
from .data.samples import Description


class SquaredReLU(nn.Module):
    """relu(x) ** 2: as sparse as a ReLU, and trains a transformer better.

    Source: So et al., Primer, arXiv:2109.08668 (2021), section 4.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        return F.relu(inputs) ** 2


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "relu2": SquaredReLU}


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, *, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (batch, length, width) for inputs of the same shape."""
        split = self.project_in(inputs).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            split[0], split[1], split[2], dropout_p=dropout, is_causal=True
        )
        return self.project_out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """One pre-norm transformer block: attention, then a network per position."""

    def __init__(self, *, width: int, heads: int, dropout: float, activation: str) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width=width, heads=heads, dropout=dropout)
        self.widen = nn.Linear(width, 4 * width)
        self.activation = ACTIVATIONS[activation]()
        self.narrow = nn.Linear(4 * width, width)
        self.dropout_1, self.dropout_2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (batch, length, width) for inputs of the same shape."""
        mixed = inputs + self.dropout_1(self.attention(self.norm_1(inputs)))
        return mixed + self.dropout_2(self.narrow(self.activation(self.widen(self.norm_2(mixed)))))


class GPT(nn.Module):
    """A decoder-only transformer over characters of a fixed length.

    Source: Radford et al., Language Models are Unsupervised Multitask Learners (2019), section 2.3.
    """

    positions: Tensor

    def __init__(
        self, *, vocabulary: int, length: int, width: int, layers: int, heads: int, dropout: float,
        activation: str, tied: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.register_buffer("positions", torch.arange(length), persistent=False)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(width=width, heads=heads, dropout=dropout, activation=activation) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # Weights as GPT-2 draws them: layers that add to the residual stream start smaller.
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("project_out.weight", "narrow.weight"))
                nn.init.normal_(parameter, std=0.02 / sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (batch, length, vocabulary) for int64 tokens (batch, length)."""
        embedded = self.dropout(self.token(tokens) + self.position(self.positions))
        return self.head(self.norm(self.blocks(embedded)))


def gpt(
    describe: Description,
    *,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    activation: str = "gelu",
    dropout: float = 0.0,
    tied: bool = False,
) -> nn.Module:
    """Return a small decoder-only transformer for text: int64 (batch, length) -> (batch, length, vocabulary).

    Raises: ConfigError: the data is not text, or an option's value does not fit."""
    if not describe.vocabulary:
        raise ConfigError("model=gpt reads text, and the data is not text; take data=text or another model")
    check_count(model__width=width, model__layers=layers, model__heads=heads)
    check_known("model.activation", activation, ACTIVATIONS)
    check_known("model.tied", tied, (True, False))
    if width % heads:
        raise ConfigError(f"model.width={width} must be a multiple of model.heads={heads}")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ConfigError(f"model.dropout={dropout} must be a number of at least 0 and below 1")
    return GPT(
        vocabulary=describe.num_classes, length=describe.input_shape[0], width=width, layers=layers,
        heads=heads, activation=activation, dropout=dropout, tied=tied,
    )  # fmt: skip


def mlp(describe: Description, *, hidden: Sequence[int] = (512, 512), activation: str = "relu") -> nn.Module:
    """Return linear layers with an activation between them: (batch, *input_shape) -> (batch, num_classes)."""
    _refuse_text("model=mlp", describe)
    check_known("model.activation", activation, ACTIVATIONS)
    if not isinstance(hidden, Sequence) or isinstance(hidden, str):
        raise ConfigError(f"model.hidden={hidden} must be a list of widths, such as [512,512]")
    for width in hidden:
        check_count(model__hidden=width)
    widths = [prod(describe.input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], describe.num_classes))


def resnet18(describe: Description) -> nn.Module:
    """Return torchvision's resnet18: (batch, 3, height, width) -> (batch, num_classes)."""
    return _of_torchvision("resnet18", describe, typed="model=resnet18")


def torchvision(describe: Description, *, name: str) -> nn.Module:
    """Return torchvision's network ``name``: (batch, 3, height, width) -> (batch, num_classes)."""
    return _of_torchvision(name, describe, typed=f"model.name={name}")


MODELS: dict[str, Callable[..., nn.Module]] = {
    function.__name__: function for function in (resnet18, mlp, gpt, torchvision)
}


def _of_torchvision(name: str, describe: Description, *, typed: str) -> nn.Module:
    import torchvision.models as zoo

    _refuse_text(typed, describe)
    known = zoo.list_models(module=zoo)
    if name not in known:
        close = get_close_matches(str(name), known, n=5, cutoff=0.5) or ["resnet18", "vgg11_bn"]
        raise ConfigError(
            f"{typed} is not one of torchvision's {len(known)} classification networks; close ones are "
            f"{', '.join(close)}; others are model=gpt, layers, mlp and own"
        )
    # Their extra heads would make the output a tuple.
    extra = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    model = zoo.get_model(name, weights=None, num_classes=describe.num_classes, **extra)
    # Refuse images that the network cannot take, before anything long begins.
    shapes = {name: tensor.to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    image = torch.zeros(1, *describe.input_shape, device="meta")
    try:
        with torch.no_grad():
            torch.func.functional_call(model.eval(), shapes, (image,))
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{typed} cannot take inputs of shape {list(describe.input_shape)} ({reason}); set data.size "
            "(many networks want 224) and data.channels=3"
        ) from error
    return model.train()


def _refuse_text(typed: str, describe: Description) -> None:
    if describe.vocabulary:
        raise ConfigError(f"{typed} reads images, and the data is text; take model=gpt or other data")
