"""Digests on record: the same for every layout, another from the step and the layer on where something is."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import answer, refusal, trained
from planted import PLANTED

from penstock import ConfigError
from penstock.pipeline.run import digests
from penstock.pipeline.run.digests import digest_of
from penstock.pipeline.run.layer_tensors import draw_histograms, numbers_of
from penstock.pipeline.run.replay import compared

JOB = (
    "model._target_=mine.Net data._target_=mine.data batch_size=8 micro_batches=4 epochs=2 threads=1 "
    "optimizer=adamw digest.every=1 codec=raw"
)


@pytest.fixture(autouse=True)
def planted():
    Path("mine.py").write_text(PLANTED)


def steps_of(folder):
    return [json.loads(line) for line in Path(folder, "digests.jsonl").read_text().splitlines()]


def diff(capture, *folders):
    capture.readouterr()
    return answer(f"diff {' '.join(folders)}", capture)[:2]


def test_lines_are_those_of_every_layout_and_go_on_with_a_run(capfd):
    trained(f"{JOB} ranks=1 stages=1 hydra.run.dir=plain")
    assert [line["step"] for line in steps_of("plain")] == list(range(16))
    values = steps_of("plain")[0]["values"]
    assert None not in values["0.weight"]
    assert values["1.running_mean"][1:] == [None, None]
    trained(f"{JOB} ranks=1 stages=3 schedule=gpipe memory.tier=packed hydra.run.dir=cut")
    threads = "ranks=2 replicas.count=2 replicas.exact=true replicas.sharded=true replicas.threads=true"
    trained(f"{JOB} {threads} hydra.run.dir=replicas")
    trained(f"{JOB} ranks=1 stages=2 checkpoint.every=5 checkpoint.keep=9 hydra.run.dir=half")
    for left in ("summary.json", "model.safetensors"):  # as a run that was killed behind step 12
        Path("half", left).unlink()
    shutil.rmtree("half/checkpoints/step_00000015")
    trained(f"{JOB} ranks=1 stages=2 checkpoint.every=5 resume=auto hydra.run.dir=half")
    for other in ("cut", "replicas", "half"):
        assert steps_of(other) == steps_of("plain"), other
        code, shown = diff(capfd, "plain", other)
        assert code == 0
        assert "the same digests in all 16 steps" in shown
        assert "another training" not in shown
    trained(f"{JOB} ranks=1 digest.every=5 hydra.run.dir=sparse")
    assert [line["step"] for line in steps_of("sparse")] == [4, 9, 14]
    assert diff(capfd, "plain", "sparse")[0] == 0


TIED = """
import torch.nn as nn
from mine import data
class Net(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(12, 12) for _ in range(4)), nn.Linear(12, 4))
        self[3].weight = self[1].weight
"""


def test_a_tied_parameter_is_digested_where_it_is_trained(capfd):
    Path("tied.py").write_text(TIED)
    job = JOB.replace("mine.Net", "tied.Net").replace("epochs=2", "max_steps=2")
    trained(f"{job} ranks=1 hydra.run.dir=plain")
    trained(f"{job} ranks=2 stages=4 cuts=['0','1','2'] schedule=zbv hydra.run.dir=cut")
    assert "part: weights" not in capfd.readouterr().out
    assert steps_of("cut") == steps_of("plain")


def test_lines_are_the_same_where_parameters_and_gradients_are_in_a_tier(capfd):
    job = "model=mlp model.hidden=[96,96] batch_size=32 micro_batches=4 max_steps=3 threads=1 clip.norm=0.1"
    job += " optimizer=adamw digest.every=1 digest.layers=true"
    trained(f"{job} ranks=1 hydra.run.dir=plain")
    layers = steps_of("plain")[2]["layers"]
    assert len(layers) == 4 * 6
    # Of the first there is no gradient, and frames keep that of a ReLU in part.
    assert [row[0] for row in layers if row[-1] is None] == [n for n in ("_0", "_2", "_4") for _ in range(4)]
    shared = "replicas.count=2 replicas.exact=true replicas.shares=[3,1]"
    trained(f"{job} ranks=2 cuts=[_2] codec=zero_value hydra.run.dir=relu")
    assert diff(capfd, "plain", "relu")[0] == 0
    for tier, options in (("disk", "schedule=zb_h1 recompute=true"), ("packed", shared)):
        capfd.readouterr()
        trained(f"{job} ranks=2 memory.parameters={tier} {options} hydra.run.dir={tier}")
        assert re.search(rf"(?m)^ +\d +{tier} ", capfd.readouterr().out)
        assert diff(capfd, "plain", tier)[0] == 0
        of_tier = steps_of(tier)[2]["layers"]
        assert [row[:2] + row[3:] for row in of_tier] == [row[:2] + row[3:] for row in layers]


def test_a_loss_that_draws_is_seeded_like_a_layer(capfd):
    job = f"{JOB} loss._target_=mine.noisy seed=3"
    trained(f"{job} ranks=1 checkpoint.every=6 checkpoint.keep=9 hydra.run.dir=plain")
    trained(f"{job} ranks=2 schedule=gpipe eval.every=3 hydra.run.dir=cut")
    trained(f"{job} ranks=2 stages=1 replicas.count=2 replicas.exact=true hydra.run.dir=replicas")
    trained(f"{job} ranks=1 resume=plain/checkpoints/step_00000006 hydra.run.dir=resumed")
    for other in ("cut", "replicas", "resumed"):
        assert diff(capfd, "plain", other)[0] == 0, other
    assert answer("replay plain step=9", capfd)[0] == 0


def test_one_wrong_label_is_found_at_its_step_and_where_gradients_begin(capfd):
    trained(f"{JOB} ranks=1 stages=2 hydra.run.dir=right")
    trained(f"{JOB} ranks=1 stages=2 data.wrong=20 hydra.run.dir=wrong")
    pairs = zip(steps_of("right"), steps_of("wrong"), strict=True)
    first = next(number for number, (one, other) in enumerate(pairs) if one != other)
    assert first > 0
    code, shown = diff(capfd, "right", "wrong")
    assert code == 1
    assert f"step {first} is the first that differs; step {first - 1} is the same" in shown
    assert "the forward differs, or its batch: the weights before it were the same" in shown
    assert "data.wrong=None and 20: is another training" in shown
    for folder in ("right", "wrong"):  # as with digest.every=5
        path = Path(folder, "digests.jsonl")
        path.write_text("".join(path.read_text().splitlines(keepends=True)[4::5]))
    code, shown = diff(capfd, "right", "wrong", "replay=true")
    assert code == 1
    assert "not every step up to 4 is on record" in shown
    assert f"replayed: step {first} is the first that differs; step {first - 1} is the same" in shown
    assert (
        "replayed: layer _6 (6), in micro-batch 0, is the first with another gradient of its output" in shown
    )
    assert Path("right/replay", f"diff_step_{first}.png").stat().st_size > 10_000
    known = digests.first_difference(Path("right"), Path("wrong"))[0]
    assert known is not None
    steps = list(compared(Path("right"), Path("wrong"), known, tell=print))
    assert [difference and difference.step for difference, _, _ in steps] == [*range(first, first + 5)]
    (_, ours, theirs), (_, later, other) = steps[:2]
    assert all(a.output.equal(b.output) for a, b in zip(ours, theirs, strict=True))
    assert not any(a.output.equal(b.output) for a, b in zip(later, other, strict=True))
    trained(f"{JOB} ranks=1 stages=2 micro_batches=2 hydra.run.dir=halves")
    code, shown = diff(capfd, "right", "halves", "replay=true")
    assert code == 1
    assert "layers are not compared, as one run has some, or micro-batches, that the other lacks" in shown


def changed(folder, step, name, kind):
    """A copy of the lines in which one digest is another from a step on."""
    rows = steps_of(folder)
    for row in rows[step:]:
        row["values"][name][kind] = "0" * 16
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def test_what_differs_first_is_said(capfd):
    for name in ("one", "other"):
        trained(f"{JOB} ranks=1 hydra.run.dir={name}")
    lines = Path("other/digests.jsonl")
    whole = lines.read_text()
    lines.write_text(changed("one", 7, "3.weight", 1))
    assert (
        "the backward parts, or its targets: the gradient of 3.weight came first"
        in diff(capfd, "one", "other")[1]
    )
    lines.write_text(changed("one", 7, "3.weight", 2))
    assert "the update parts: its gradients were the same" in diff(capfd, "one", "other")[1]
    lines.write_text("".join(changed("one", 7, "3.weight", 1).splitlines(keepends=True)[::4]))
    assert "not every step up to 8 is on record" in diff(capfd, "one", "other")[1]
    lines.write_text(whole.replace('"3.bias"', '"4.bias"'))
    assert "of different models: one alone has 3.bias" in refusal("one other", capfd, name="diff")


def test_replicas_that_part_are_told_with_their_step_and_name(capfd, monkeypatch):
    of_rank = digests.digests_of

    def other(pipe):
        found = of_rank(pipe)
        if pipe.rank == 1 and pipe.num_steps == 3:
            found["3.weight"][1] = "0" * 16
        return found

    monkeypatch.setattr(digests, "digests_of", other)
    trained(f"{JOB} ranks=2 replicas.count=2 replicas.threads=true hydra.run.dir=parted")
    told = [line for line in "".join(capfd.readouterr()).splitlines() if "replicas part" in line]
    assert [line.partition("step")[1:] for line in told] == [
        ("step", " 2: replicas part: gradients of 3.weight on rank 1")
    ]


def test_replicas_that_are_compared_after_each_update_end_where_they_part(capfd, monkeypatch):
    monkeypatch.setenv("FLIP", "7 256 20 1")
    job = JOB.replace("optimizer=adamw digest.every=1", "optimizer._target_=mine.Faulty optimizer.lr=0.1")
    job += " ranks=2 replicas.count=2 replicas.exact=true stages=1"
    trained(f"{job} hydra.run.dir=rarely")
    said = refusal(f"{job} replicas.check=digest hydra.run.dir=each", capfd)
    assert "3.weight of stage 0 differs on rank 0 and rank 1 behind update 8" in said
    assert "replicas.check=often is not known" in refusal(f"{job} replicas.check=often", capfd)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            "digest.layers=true",
            "digest.layers=true adds to lines of digests, found none; add",
        ),
        ("schedule=async_1f1b weights=stashed", "found weights=stashed"),
        ("digest.every=1 audit.every=1h", "compares digests, found no checkpoints; add checkpoint.every=100"),
        ("digest.every=1 audit.every=x checkpoint.every=1", "audit.every=x is not a time; write it like 30s"),
        ("digest.every=0", "digest.every=0 must be 1 or more"),
    ],
)
def test_what_has_no_moment_to_be_digested_is_refused(options, said, capfd):
    job = JOB.replace("digest.every=1", "") if "digest" in options else JOB
    assert said in refusal(f"{job} ranks=1 stages=2 {options} hydra.run.dir=none", capfd)


def test_a_digest_sees_bits_dtype_shape_and_layout():
    x = torch.arange(6.0).reshape(2, 3)
    others = [x.double(), x.reshape(3, 2), x.t().contiguous().t(), x.neg(), x.to_sparse(), None, 1.0, "x"]
    assert len({digest_of(one) for one in (x, *others)}) == 9
    assert digest_of(torch.tensor(0.0)) != digest_of(torch.tensor(-0.0))
    assert digest_of(x.clone()) == digest_of(x)
    one = torch.ones(4, 3, 1, 1)  # whose gradients have either stride, as kernels please
    assert digest_of(one) == digest_of(one.as_strided(one.shape, (3, 1, 3, 3)))


def test_a_digest_sees_what_a_state_holds_and_no_address():
    rows = [{"a": torch.ones(3000), "b": [1, {2: 3}]}, {"b": [1, {2: 3}], "a": torch.ones(3000)}]
    assert digest_of(rows[0]) == digest_of(rows[1])
    rows[1]["a"][1500] = 2
    assert digest_of(rows[0]) != digest_of(rows[1])
    assert digest_of({1: 1, "1": 2}) != digest_of({1: 2, "1": 1})

    class Own:
        def __init__(self, value):
            self.value = value

    assert digest_of(Own(1)) == digest_of(Own(1)) != digest_of(Own(2))


@pytest.mark.parametrize(
    "content", [b"\xff\n", b"[]\n", b'{"step": 3}\n', b'{"step": 3, "loss": 1, "values": []}\n']
)
def test_a_damaged_record_is_one_sentence(content, capfd):
    trained(f"{JOB} ranks=1 max_steps=2 hydra.run.dir=one")
    shutil.copytree("one", "other")
    Path("other/digests.jsonl").write_bytes(content)
    assert "other/digests.jsonl is damaged" in refusal("one other", capfd, name="diff")
    assert "other/digests.jsonl is damaged" in refusal("other step=1", capfd, name="replay")


def test_histograms_of_odd_tensors_are_drawn(tmp_path):
    odd = {
        "near": torch.tensor([1.0, 1 + 2**-52], dtype=torch.float64), "large": torch.tensor([-1e308, 1e308]),
        "whole": torch.tensor([2**60, 2**60 + 1]), "complex": torch.tensor([1j, 2 + 0j, complex("nan")]),
        "none": torch.full((3,), torch.nan), r"$\frac$": torch.randn(9), "no": torch.empty(0, 2),
        "sparse": torch.eye(3).to_sparse(),
    }  # fmt: skip
    draw_histograms(odd, tmp_path / "h.png", title=r"$\frac$ [/red]")
    assert (tmp_path / "h.png").stat().st_size > 10_000
    assert numbers_of(odd["complex"]).isnan().sum() == 1


def test_a_folder_that_is_no_run_is_told_from_a_run_without_digests(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config.yaml, so it is no folder of a run"):
        digests.recorded(tmp_path)
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"train with digest.every=10"):
        digests.recorded(tmp_path)
