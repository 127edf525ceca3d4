"""A GPT-2 of Hugging Face in their Trainer, cut into stages: plainly or under torchrun.

pip install transformers accelerate
torchrun --nproc-per-node 2 scripts/examples/trainer.py 6
"""

from __future__ import annotations

import sys

import torch
from llama import batches
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from penstock.pipeline.integrations.transformers import PipelineTrainer


def main(steps: int = 20) -> None:
    """Train as Trainer does; gradient_accumulation_steps are the micro-batches of a step."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4))
    args = TrainingArguments(
        "trainer",
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=5,
        report_to=[],
        use_cpu=True,
    )
    texts = [{"input_ids": ids, "labels": ids} for batch in batches(steps) for ids in batch["input_ids"]]
    trainer = PipelineTrainer(model, args, train_dataset=texts)  # pyright: ignore[reportArgumentType]
    trainer.train()
    trainer.save_model("trainer/final")
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history[:-1]:
            print(f"step {entry['step'] - 1}: loss {entry['loss']}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
