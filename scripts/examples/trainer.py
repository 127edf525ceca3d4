"""A GPT-2 of Hugging Face in their Trainer, cut into stages: plainly or under torchrun.

pip install transformers accelerate
torchrun --nproc-per-node 2 scripts/examples/trainer.py 6
python scripts/examples/trainer.py 6 64 plain   # their own Trainer, for its speed; 64 is the width
"""

import sys

import torch
from llama import batches
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from penstock.pipeline.integrations.transformers import PipelineTrainer


def main(steps: str = "20", width: str = "64", trainer: str = "pipeline") -> None:
    """Train as Trainer does; gradient_accumulation_steps are the micro-batches of a step."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=256, n_positions=64, n_embd=int(width), n_layer=4, n_head=4)
    )
    args = TrainingArguments(
        "trainer",
        max_steps=int(steps),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_steps=5,
        report_to=[],
        use_cpu=True,
    )
    texts = [{"input_ids": ids, "labels": ids} for batch in batches(int(steps)) for ids in batch["input_ids"]]
    kind = Trainer if trainer == "plain" else PipelineTrainer
    trains = kind(model, args, train_dataset=texts)  # pyright: ignore[reportArgumentType]
    trains.train()
    trains.save_model("trainer/final")
    if trains.is_world_process_zero():
        for entry in trains.state.log_history[:-1]:
            print(f"step {entry['step'] - 1}: loss {entry['loss']}")
        print(f"{trains.state.log_history[-1]['train_steps_per_second']} steps/s")


if __name__ == "__main__":
    main(*sys.argv[1:4])
