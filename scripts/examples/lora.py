"""Adapters of peft on a Llama of Hugging Face: plainly or under torchrun.

pip install transformers peft
torchrun --nproc-per-node 2 scripts/examples/lora.py 20
"""

import sys

import torch
from llama import BATCH, MICRO_BATCHES, batches, network
from peft import LoraConfig, PeftModel, get_peft_model

import penstock


def main(steps: int = 20) -> None:
    """Train the adapters alone, save them as peft does, and load them into the plain model."""
    model = get_peft_model(network(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    data = batches(steps)
    pipe = penstock.Pipeline.of(
        model,
        {name: x[: BATCH // MICRO_BATCHES] for name, x in data[0].items()},
        stages=2,
        micro_batches=MICRO_BATCHES,
        loss=lambda outputs, targets: outputs.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )
    for batch in data:
        report = pipe.step(batch)
        if pipe.rank == 0:
            print(f"step {report.step}: loss {report.loss:.4f}")
    state = pipe.state_dict()  # of all stages, on rank 0
    if pipe.rank == 0:
        model.load_state_dict(state["model"])
        model.save_pretrained("adapters")
        loaded = PeftModel.from_pretrained(network(), "adapters")
        print(f"loaded: loss {loaded(**data[-1]).loss.item():.4f}")
    pipe.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
