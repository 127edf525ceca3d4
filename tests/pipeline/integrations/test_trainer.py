"""Trainers of Hugging Face: the bits of the plain Trainer, its logs, its evaluation, and its checkpoints."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ON_RANKS, run_script
from reference import same_tree
from safetensors.torch import load_file
from torch import nn

import penstock

transformers = pytest.importorskip("transformers", reason="pip install transformers accelerate")
pytest.importorskip("accelerate", reason="pip install transformers accelerate")
from penstock.pipeline.integrations.transformers import OffloadMixin, PipelineTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)


class Net(nn.Module):
    """Takes no number of items: its loss is a mean over the samples of a micro-batch."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 2)

    def forward(self, input_ids, attention_mask, labels):
        logits = self.head(self.embed(input_ids).relu().mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def gpt2():
    sizes: dict[str, Any] = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 3, "n_head": 2}
    dropouts: dict[str, Any] = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts))


def bert():
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    dropouts: dict[str, Any] = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=64, **sizes, **dropouts)
    )


def rows(number, seed):
    """Sequences of unlike lengths, and a class each."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 20, (number,), generator=draw).tolist()
    return [(torch.randint(1, 64, (length,), generator=draw), i % 2) for i, length in enumerate(lengths)]


def padded(samples):
    """Arguments of BERT; of GPT-2 labels are the words that are no padding."""
    ids = nn.utils.rnn.pad_sequence([ids for ids, _ in samples], batch_first=True)
    mask, classes = (ids != 0).long(), torch.tensor([label for _, label in samples])
    return {"input_ids": ids, "attention_mask": mask, "labels": classes}


def words(samples):
    found = padded(samples)
    return found | {"labels": found["input_ids"].masked_fill(found["attention_mask"] == 0, -100)}


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def arguments(folder, **changed):
    options: dict[str, Any] = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "num_train_epochs": 2,
        "learning_rate": 1e-3, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        "logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "epoch", "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "remove_unused_columns": False,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **options | changed)


def trainer(kind, model, folder, changed=None, **named) -> Any:
    torch.manual_seed(0)
    return kind(
        model(),
        arguments(folder, **changed or {}),
        train_dataset=rows(29, seed=2),  # the last step has two micro-batches, of 4 and of 1
        eval_dataset=rows(10, seed=3),
        data_collator=words if model is gpt2 else padded,
        compute_metrics=None if model is gpt2 else accuracy,
        **named,
    )


def logs(one):
    """The log without times; a mean of losses is rounded in another order."""
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "epoch", "step")
    rows = [{key: entry[key] for key in kept if key in entry} for entry in one.state.log_history]
    means = isinstance(one.model, Net)
    return [row | ({"loss": pytest.approx(row["loss"])} if means and "loss" in row else {}) for row in rows]


@pytest.mark.parametrize(
    "model", [bert, *(pytest.param(model, marks=pytest.mark.slow) for model in (Net, gpt2))]
)
def test_a_trainer_in_stages_has_the_bits_and_the_logs_of_the_plain_one(model, tmp_path):
    plain = trainer(transformers.Trainer, model, tmp_path / "plain")
    plain.train()
    staged = trainer(PipelineTrainer, model, tmp_path / "staged")
    staged.train()
    assert staged.pipe.plan.num_stages == 2
    assert logs(staged) == logs(plain)
    for step in (3, 6):
        both = [tmp_path / name / f"checkpoint-{step}" / "model.safetensors" for name in ("plain", "staged")]
        assert same_tree(*map(load_file, both))
    again = trainer(PipelineTrainer, model, tmp_path / "again", pipeline={"stages": 3, "schedule": "gpipe"})
    again.train(resume_from_checkpoint=str(tmp_path / "staged" / "checkpoint-3"))
    assert logs(again)[:-1] == logs(plain)[:-1]
    weights = tmp_path / "again" / "checkpoint-6" / "model.safetensors"
    expected = load_file(tmp_path / "plain" / "checkpoint-6" / "model.safetensors")
    assert same_tree(load_file(weights), expected)
    (_, labels, found), (_, _, expected) = (one.predict(rows(6, seed=4)) for one in (staged, plain))
    assert len(labels) == 6
    assert found["test_loss"] == expected["test_loss"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed", [{"max_grad_norm": 0}, {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2}]
)
def test_what_is_logged_without_a_clip_or_with_another_scheduler_is_the_same(changed, tmp_path):
    both = [
        trainer(kind, bert, tmp_path / kind.__name__, changed | {"max_steps": 2, "eval_strategy": "no"})
        for kind in (transformers.Trainer, PipelineTrainer)
    ]
    for one in both:
        one.train()
    assert logs(both[0]) == logs(both[1])
    assert both[1].state.log_history[0]["grad_norm"] > 0


def test_saved_tensors_of_any_trainer_are_packed(tmp_path):
    class Packed(OffloadMixin, transformers.Trainer):
        pass

    plain, packed = (trainer(kind, bert, tmp_path / kind.__name__) for kind in (transformers.Trainer, Packed))
    for one in (plain, packed):
        one.train()
    with packed.compute_loss_context_manager():
        values = torch.randn(256, 256, requires_grad=True).relu()
    assert values.grad_fn is not None
    assert 0 < packed.saved.bytes_kept < packed.saved.bytes_raw
    assert same_tree(dict(plain.model.state_dict()), dict(packed.model.state_dict()))


class Own(PipelineTrainer):
    def compute_loss(self, *arguments, **named):
        return super().compute_loss(*arguments, **named)


@pytest.mark.parametrize(
    ("changed", "named", "sentence"),
    [
        ({"gradient_accumulation_steps": 1}, {}, "number of micro-batches .* found 1; set 8"),
        ({"bf16": True}, {}, "takes no bf16, found True; give pipeline="),
        ({"label_smoothing_factor": 0.1}, {}, "takes no label_smoothing_factor, found 0.1"),
        ({}, {"compute_loss_func": print}, "found compute_loss_func of your own; compute"),
        ({}, {"pipeline": {"schedule": "async_1f1b"}}, "in flight there .*; choose 1f1b"),
        ({}, {"pipeline": {"weights": "double_buffered"}}, "in flight there .*; choose 1f1b"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, {}, "without a metric"),
        ({}, {"optimizers": (print, None)}, "found optimizers of your own; give optimizer_cls_and_kwargs="),
        ({}, {"kind": Own}, "found compute_loss of your own; compute"),
    ],
)
def test_what_a_pipeline_does_otherwise_is_refused(changed, named, sentence, tmp_path):
    given = {"kind": PipelineTrainer, "train_dataset": rows(8, seed=2), **named}
    with pytest.raises(penstock.ConfigError, match=sentence):
        given.pop("kind")(Net(), arguments(tmp_path, **changed), **given)
    assert list(Path(tmp_path).iterdir()) == []


def test_an_argument_that_no_pipeline_takes_is_refused_at_once(tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'microbatches'"):
        PipelineTrainer(Net(), arguments(tmp_path), pipeline={"microbatches": 8})


def test_a_second_training_and_a_checkpoint_of_another_trainer_are_refused(tmp_path):
    trainer(transformers.Trainer, Net, tmp_path / "plain").train()
    checkpoint = tmp_path / "plain" / "checkpoint-3"
    staged = trainer(PipelineTrainer, Net, tmp_path / "staged")
    with pytest.raises(penstock.ConfigError, match=r"no folder penstock in .*checkpoint-3; load its model"):
        staged.train(resume_from_checkpoint=str(checkpoint))
    staged.train()
    with pytest.raises(penstock.ConfigError, match="trains once, found a second train"):
        staged.train()


SCRIPT = """
import json, os, sys
import torch, transformers
from test_trainer import Net, PipelineTrainer, accuracy, arguments, bert, logs, padded, rows

kind = {"plain": transformers.Trainer, "ranks": PipelineTrainer}[sys.argv[1]]

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from rows(24, seed=5)

def trainer(folder, data, **changed):
    torch.manual_seed(0)
    args = arguments(folder, **changed)
    return kind(model=bert(), args=args, train_dataset=data, eval_dataset=rows(10, seed=3),
                data_collator=padded, compute_metrics=accuracy)

best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "save_total_limit": 2}
one = trainer(sys.argv[1], rows(29, seed=2), **best)
one.train()
ended = one.evaluate()["eval_loss"], one.predict(rows(6, seed=4))
two = trainer("stream_" + sys.argv[1], Stream(), max_steps=3, eval_strategy="no", save_strategy="no")
two.train()
if one.is_world_process_zero():
    weights = [sum(p.double().sum().item() for p in each.model.parameters()) for each in (one, two)]
    found = ended[1].predictions.tolist(), sorted(os.listdir(sys.argv[1]))
    print("RESULT", json.dumps([logs(one)[:-1], logs(two)[:-1], ended[0], found, weights]))
"""


@pytest.mark.slow
@pytest.mark.ranks
def test_on_two_ranks_evaluation_the_best_model_and_streams_are_those_of_one_process(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    results = []
    for start, name in ((), "plain"), (ON_RANKS, "ranks"):
        shown = run_script(*start, "script.py", name, cwd=tmp_path)
        results.append(re.findall(r"^RESULT (.*)$", shown, flags=re.MULTILINE))
    assert len(results[0]) == len(results[1]) == 1
    assert json.loads(results[0][0]) == json.loads(results[1][0])
