"""A Llama of Hugging Face that returns its logits, for ``model._target_=llama_logits.Llama``."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Llama(torch.nn.Module):
    """Eight layers of 256 numbers a token."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8}
        config = LlamaConfig(vocab_size=num_classes, num_attention_heads=4, use_cache=False, **sizes)
        self.llama = LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (samples, length, num_classes) of tokens (samples, length)."""
        return self.llama(input_ids=tokens).logits
