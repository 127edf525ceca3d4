"""A Llama of Hugging Face on text, called by a dict, with its own loss: plainly or under torchrun.

pip install transformers
torchrun --nproc-per-node 2 scripts/examples/llama.py 20
"""

import sys
from importlib.resources import files
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import penstock

LENGTH, BATCH, MICRO_BATCHES = 64, 16, 4


def batches(steps: int) -> list[dict[str, torch.Tensor]]:
    """Stretches of Python's own help texts, a byte a token; the same ones on every rank."""
    topics = files("pydoc_data").joinpath("topics.py").read_bytes()
    text = torch.frombuffer(bytearray(topics), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - LENGTH, (steps, BATCH), generator=generator)
    rows = [torch.stack([text[start : start + LENGTH] for start in row]).long() for row in starts]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in rows]


def network() -> LlamaForCausalLM:
    """A small Llama, with the same first values on every call and rank."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes))


def main(steps: int = 20) -> None:
    """Cut the network in two where the planner likes it, and train it."""
    model = network()
    data = batches(steps)
    example = {name: x[: BATCH // MICRO_BATCHES] for name, x in data[0].items()}
    pipe = penstock.Pipeline.of(
        model,
        example,
        stages=2,
        micro_batches=MICRO_BATCHES,
        loss=lambda outputs, targets: outputs.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        clip=1.0,
    )
    if pipe.rank == 0:
        print(pipe.plan)
    for batch in data:
        report = pipe.step(batch)
        if pipe.rank == 0:
            print(f"step {report.step}: loss {report.loss:.4f}")
    pipe.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
