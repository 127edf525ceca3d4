"""A BERT of transformers on buckets of five lengths, with and without padding: killed, and gone on with."""

import pytest
from checkout import ON_RANKS, run_script
from safetensors.torch import load_file

# What a person writes; "plain" is the loop that it was before.
SCRIPT = """
import os, signal, sys, torch, penstock
from safetensors.torch import save_file
from transformers import BertConfig, BertForMaskedLM

how, file, steps, killed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.manual_seed(0)
model = BertForMaskedLM(BertConfig(
    vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
))

def batch(step):
    draw = torch.Generator().manual_seed(step)
    length = (8, 12, 16, 20, 24)[int(torch.randint(5, (), generator=draw))]
    ids, mask = torch.randint(1, 64, (8, length), generator=draw), torch.ones(8, length, dtype=torch.int64)
    for sample in range(0, 8, 1 + step % 4) if step % 3 else ():
        mask[sample, length - 1 - sample % 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

def counted(labels):
    return int((labels != -100).sum())

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)

if how == "plain":
    update = optimizer(model.parameters())
    for step in range(steps):
        parts = [{k: x[i : i + 4] for k, x in batch(step).items()} for i in (0, 4)]
        total = sum(counted(part["labels"]) for part in parts)
        for part in parts:
            (model(**part).loss * (counted(part["labels"]) / total)).backward()
        update.step(), update.zero_grad()
    state = model.state_dict()
else:
    example = {k: x[:4] for k, x in batch(0).items()}
    pipe = penstock.Pipeline.of(model, example, stages=2, micro_batches=2, optimizer=optimizer,
                                loss=lambda outputs, _: outputs.loss, weight=counted)
    if (found := penstock.newest("saved")) is not None:
        penstock.load(pipe, found)
    for step in range(pipe.num_steps, steps):
        whole = batch(step)
        pipe.step(whole, whole["labels"])
        if step % 10 == 9:
            penstock.save(pipe, "saved", keep=2)
        if step == killed and pipe.rank == pipe.world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    state = pipe.state_dict()["model"]
    pipe.close()
if how == "plain" or pipe.rank == 0:  # which has the whole state
    save_file({name: tensor.clone() for name, tensor in state.items()}, file)
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_buckets_with_and_without_padding_go_on_where_they_were_killed(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    script = tmp_path / "buckets.py"
    script.write_text(SCRIPT)

    def train(how, file, killed, *start):
        return (*start, str(script), how, file, "200", str(killed))

    run_script(*train("plain", "plain.safetensors", -1), cwd=tmp_path)
    with pytest.raises(AssertionError, match="SIGKILL"):
        run_script(*train("cut", "none.safetensors", 70, *ON_RANKS), cwd=tmp_path)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["step_00000060", "step_00000070"]
    run_script(*train("cut", "cut.safetensors", -1, *ON_RANKS), cwd=tmp_path)
    plain, cut = (load_file(tmp_path / f"{name}.safetensors") for name in ("plain", "cut"))
    assert plain.keys() == cut.keys()
    assert [name for name in plain if not plain[name].equal(cut[name])] == []
