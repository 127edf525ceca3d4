"""Steps once more: on any cut the digests on record, and where a bit was flipped, its step and its name."""

import io
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import answer, refusal, summary, train, trained
from planted import PLANTED
from safetensors.torch import load_file

import penstock
from penstock.pipeline.run.live_audit import LiveAudit
from penstock.pipeline.run.run_folder import RunFolder

JOB = (
    "model._target_=mine.Net data._target_=mine.data batch_size=8 micro_batches=4 epochs=2 threads=1 "
    "digest.every=1 codec=zero_value"
)
FAULTY = "optimizer._target_=mine.Faulty optimizer.lr=0.1"
SIZES = {"0.weight": 192, "3.weight": 256, "6.bias": 4}


@pytest.fixture(autouse=True)
def planted():
    Path("mine.py").write_text(PLANTED)


def test_a_run_that_was_killed_and_resumed_on_fewer_ranks_is_repeated_on_any_cut(capfd):
    job = f"{JOB} optimizer=adamw scheduler=cosine checkpoint.every=4 checkpoint.keep=9 hydra.run.dir=run"
    trained(f"{job} ranks=3 memory.tier=disk")
    for left in ("summary.json", "model.safetensors"):  # as a run that was killed behind step 12
        Path("run", left).unlink()
    for step in (12, 16):
        shutil.rmtree(f"run/checkpoints/step_{step:08}")
    trained(f"{job} ranks=2 resume=auto memory.parameters=device")
    cuts = (
        "",
        "stages=3 schedule=gpipe",
        "stages=2 memory.tier=packed",
        "ranks=3 schedule=zb_h1",
        "threads=1",
    )
    for step, cut in zip((0, 3, 7, 8, 15), cuts, strict=True):
        code, shown, _ = answer(f"replay run step={step} {cut}", capfd)
        assert code == 0
        assert re.search(rf"^step {step}: loss [\d.]+; the same digests", shown, re.M), shown
    trained_weights = load_file("run/model.safetensors")
    assert answer("replay run step=15 show=3", capfd)[0] == 0
    shown = load_file("run/replay/step_15.safetensors")
    assert Path("run/replay/step_15.png").stat().st_size > 10_000
    kinds = {"weights", "gradients", "step", "exp_avg", "exp_avg_sq"}
    assert {name.split()[1] for name in shown} == {*kinds, "output,", "output"}
    assert shown["3.weight weights"].equal(trained_weights["3.weight"])
    returned = list(penstock.replay("run", 15, show="3", options=["stages=3", "schedule=zb_h1"]))
    assert [one.micro_batch for one in returned] == [0, 1, 2, 3]
    for one in returned:
        assert one.gradient is not None
        assert one.output.equal(shown[f"_3 output, micro-batch {one.micro_batch}"])
        assert one.gradient.equal(shown[f"_3 output gradient, micro-batch {one.micro_batch}"])


def test_what_layers_returned_and_its_gradients_make_up_those_of_the_weights(monkeypatch, capfd):
    trained(f"{JOB} ranks=1 optimizer=sgd hydra.run.dir=run")
    tensors = {(one.layer, one.micro_batch): one for one in penstock.replay("run", 5)}
    assert {layer for layer, _ in tensors} == {f"_{number}" for number in range(7)}
    expected = torch.zeros(4, 16)
    for number in range(4):
        gradient = tensors["_6", number].gradient
        assert gradient is not None
        expected += gradient.T @ tensors["_5", number].output
    assert answer("replay run step=5 show=6", capfd)[0] == 0
    torch.testing.assert_close(load_file("run/replay/step_5.safetensors")["6.weight gradients"], expected)
    monkeypatch.setattr(sys, "stdin", io.StringIO("p layer.name, len(env)\n" + 4 * "c\n"))
    code, shown, _ = answer("replay run step=5 break=3 stages=2", capfd)
    assert code == 0
    assert shown.count("before layer _3") == 4
    assert "('_3', 1)" in shown
    for typed in ("q\n", 3 * "s\n" + "q\n"):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        assert answer("replay run step=5 break=3", capfd)[0] == 1


def test_a_run_without_checkpoints_or_digests_is_repeated_from_the_beginning(capfd):
    trained(f"{JOB} ranks=1 digest.every=null hydra.run.dir=run")
    code, shown, _ = answer("replay run step=2", capfd)
    assert code == 0
    assert "the same loss as on record, which has no digests of this step" in shown
    Path("run", "starts.jsonl").unlink()  # as in a run of an older version
    config = Path("run", "config.yaml")
    config.write_text(re.sub(r"(?m)^  torch: .*$", "  torch: 1.2.3", config.read_text()))
    assert re.search(r"bits may differ: versions.torch=\S+ was 1.2.3", answer("replay run step=2", capfd)[2])
    Path("run", "digests.jsonl").touch()
    assert "has no digests.jsonl" in refusal("run", capfd, name="audit")


def test_a_run_that_went_on_from_another_is_repeated_from_there_with_sparse_digests(capfd):
    trained(
        f"{JOB} ranks=1 optimizer=adamw max_steps=8 checkpoint.every=3 checkpoint.keep=9 hydra.run.dir=one"
    )
    trained(f"{JOB} ranks=1 optimizer=adamw digest.every=2 resume=one hydra.run.dir=two")
    code, shown, _ = answer("replay two step=10", capfd)
    assert code == 0
    assert "step 10: " in shown
    assert (
        "the same loss as on record, which has no digests of this step; 2 compared before it, the same"
        in shown
    )
    assert "two has steps 6 to 15 in metrics.jsonl, found step=3" in refusal(
        "two step=3", capfd, name="replay"
    )
    for path in Path("one", "checkpoints").iterdir():
        shutil.rmtree(path)
    assert "two went on from resume=" in refusal("two step=10", capfd, name="replay")


@pytest.mark.parametrize(
    ("seed", "name"),
    [
        (n, [*SIZES][n % 3]) if n < 3 else pytest.param(n, [*SIZES][n % 3], marks=pytest.mark.slow)
        for n in range(20)
    ],
)
def test_one_flipped_bit_is_found_at_its_step_in_its_gradient(seed, name, monkeypatch, capfd):
    step, bit = 1 + 7 * seed % 15, 7 * seed % 32
    monkeypatch.setenv("FLIP", f"{step} {SIZES[name]} {bit}")
    layout = (
        "ranks=3",
        "ranks=2 replicas.count=2 replicas.exact=true stages=1",
        "ranks=2 memory.tier=packed",
    )
    trained(f"{JOB} {FAULTY} {layout[seed % 3]} checkpoint.every=5 checkpoint.keep=9 hydra.run.dir=run")
    monkeypatch.delenv("FLIP")
    code, shown, _ = answer("audit run steps=16", capfd)
    assert code == 1
    first, differs = next(
        one for one in re.findall(r"^step (\d+) \(.*?\): (.*)$", shown, re.M) if one[1] != "as on record"
    )
    assert int(first) == step
    assert differs.startswith(f"step {step} is the first that differs")
    assert re.search(rf"gradients: 1 differ, {re.escape(name)}\n", shown), shown
    assert "the run computed otherwise" in shown
    rank = {"0.weight": "0", "3.weight": "[01]", "6.bias": "[12]"}[name]
    assert re.search(rf"  {re.escape(name)} was computed by rank {rank} \(stage \d\) on \S", shown), shown
    assert answer(f"replay run step={step - 1}", capfd)[0] == 0
    assert answer(f"replay run step={step}", capfd)[0] == 1


def test_one_flipped_bit_in_a_forward_is_found_at_its_layer_and_micro_batch(monkeypatch, capfd):
    job = JOB.replace("mine.Net", "mine.weak model.leaves=[mine.Weak] digest.layers=true optimizer=adamw")
    trained(f"{job} ranks=1 hydra.run.dir=clean")
    of_input = next(one for one in penstock.replay("clean", 5, show="1") if one.micro_batch == 2)
    monkeypatch.setenv("WEAK", repr(of_input.output.flatten()[0].item()))
    trained(f"{job} ranks=2 stages=2 clip.norm=1e9 checkpoint.every=4 checkpoint.keep=9 hydra.run.dir=run")
    monkeypatch.delenv("WEAK")
    code, shown, _ = answer("audit run steps=16", capfd)
    assert code == 1
    assert shown.count("as on record") == 13  # all but those from step 5 to the next checkpoint
    assert "layer _2 (2), in micro-batch 2, is the first whose output differs\n" in shown
    assert re.search(r"  layer _2 was computed by rank 0 \(stage 0\) on \S", shown), shown


def test_a_checkpoint_that_is_not_what_the_run_had_is_refused(capfd):
    trained(f"{JOB} ranks=1 optimizer=adamw checkpoint.every=4 checkpoint.keep=9 hydra.run.dir=run")
    lines = Path("run/digests.jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    rows[7]["values"]["3.weight"][0] = rows[7]["values"]["6.bias"][2] = "0" * 16
    lines.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    said = refusal("run step=9", capfd, name="replay")
    assert "00000008 is not what the run had then, weights: 1 differ, 3.weight, optimizer state: 1" in said
    shutil.rmtree("run/checkpoints/step_00000008")
    assert answer("replay run step=4", capfd)[0] == 0


@pytest.mark.parametrize(
    "stream",
    [
        "schedule=async_1f1b weights=stashed",
        "schedule=async_1f1b weights=latest prediction=true",
        "schedule=1f1b weights=double_buffered error_feedback=true",
    ],
)
def test_a_step_of_a_stream_is_repeated_from_its_checkpoint_or_from_the_beginning(stream, capfd):
    job = JOB.replace("digest.every=1", "optimizer=adamw checkpoint.every=5 checkpoint.keep=9")
    trained(f"{job} epochs=3 ranks=3 {stream} eval.every=7 memory.tier=packed hydra.run.dir=run")
    losses = [json.loads(line)["loss"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    for step in (0, 5, 8, 15, 23):
        if step == 15:
            shutil.rmtree("run/checkpoints")
        code, shown, _ = answer(f"replay run step={step}", capfd)
        assert code == 0
        assert f"step {step}: loss {losses[step]}; the same loss as on record, which has no digests" in shown
    lines = Path("run/metrics.jsonl")
    lines.write_text(lines.read_text().replace(repr(losses[8]), repr(losses[8] + 1e-6)))
    code, shown, _ = answer("replay run step=15", capfd)
    assert code == 1
    assert f"step 8: the loss differs, {losses[8] + 1e-6} and {losses[8]}; no digests are on record" in shown


def test_steps_whose_bits_depend_on_the_cut_are_repeated_and_audited_on_it(capfd):
    trained(f"{JOB} optimizer=adamw ranks=3 codec=bf16 hydra.run.dir=lossy")
    clip = "clip.norm=0.1 clip.scope=stage ranks=2 stages=4 schedule=interleaved"
    trained(f"{JOB} optimizer=adamw {clip} hydra.run.dir=clipped")
    for run in ("lossy", "clipped"):
        assert answer(f"replay {run} step=9", capfd)[0] == 0
        code, shown, _ = answer(f"audit {run} steps=2", capfd)
        assert code == 0
        assert shown.count("(the same cut): as on record") == 2


def test_an_audit_beside_a_run_is_a_process_that_repeats_a_step_after_the_newest_checkpoint(
    monkeypatch, capfd
):
    monkeypatch.setenv("FLIP", "13 192 20 0")
    job = f"{JOB} {FAULTY} ranks=2 audit.every=1h"
    trained(f"{job} checkpoint.every=12 hydra.run.dir=run")
    assert summary("run")["audit"] == {"steps": [], "differ": []}
    report: Any = SimpleNamespace(step=15)

    def audited(folder):
        told = list[str]()
        options: Any = {"seconds": 0.0, "digest_every": 4}  # of the steps after 12 one is on record
        audit, until = LiveAudit(RunFolder(path=Path(folder)), tell=told.append, **options), time.time() + 90
        while not (audit.result["steps"] or told) and time.time() < until:
            time.sleep(0.1)
            audit.after(report)
        audit.close()
        return audit.result, told

    result, told = audited("run")
    assert result == {"steps": [15], "differ": [15]}
    assert "step 13 is the first that differs" in told[0]
    assert "0.weight was computed by rank 0" in told[0]
    monkeypatch.setenv("FLIP", "13 192 20")  # the audit computes wrongly, too
    assert audited("run") == ({"steps": [15], "differ": []}, [])
    Path("mine.py").write_text(PLANTED + "\nraise MemoryError('none left')\n")
    result, told = audited("run")
    assert result == {"steps": [], "differ": []}
    assert "step 15 could not be repeated" in told[0]
    assert "none left" in told[0]
    shutil.rmtree("run/checkpoints")
    audit = LiveAudit(RunFolder(path=Path("run")), seconds=0, digest_every=1, tell=print)
    audit.after(report)
    audit.close()
    assert audit.result["steps"] == []


WAITS = """
import sys, time

if "audit" in sys.argv:
    open("begun", "w").close()

class Waits(torch.optim.SGD):
    count = 0

    def step(self, closure=None):
        Waits.count += 1
        until = time.time() + 60
        while "audit" not in sys.argv and Waits.count == 60 and not os.path.exists("begun"):
            assert time.time() < until
            time.sleep(0.05)
        return super().step(closure)
"""


def test_a_run_audits_itself_and_ends_an_audit_that_is_on_its_way(capfd):
    Path("mine.py").write_text(PLANTED + WAITS)
    job = JOB.replace("epochs=2", "epochs=10") + " checkpoint.every=5 checkpoint.keep=999"
    job += " optimizer._target_=mine.Waits optimizer.lr=0.1"
    trained(f"{job} ranks=1 audit.every=0.1s hydra.run.dir=run")
    shown = capfd.readouterr().out
    assert "audit.every=" not in shown, shown
    assert summary("run")["audit"]["differ"] == []
    assert Path("begun").exists()
    own = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert not [pid for pid in own if b"audit" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]


def test_steps_before_a_start_with_other_options_are_repeated_with_theirs(capfd):
    job = JOB.replace("epochs=2", "") + " optimizer=adamw scheduler=cosine ranks=1 hydra.run.dir=run"
    trained(f"{job} epochs=2 checkpoint.every=8 checkpoint.keep=9")
    for left in ("summary.json", "model.safetensors"):
        Path("run", left).unlink()
    shutil.rmtree("run/checkpoints/step_00000016")
    trained(f"{job} epochs=4 resume=auto checkpoint.every=100")
    code, shown, _ = answer("audit run steps=32", capfd)
    assert code == 0
    assert shown.count("as on record") == 32
    shutil.rmtree("run/checkpoints/step_00000008")
    assert answer("replay run step=7", capfd)[0] == 0
    said = refusal("run step=9", capfd, name="replay")
    assert "found none of step 8 in run, where epochs=4 was 2; name a step before it" in said
    trained(f"{JOB} optimizer=adamw codec=bf16 ranks=3 checkpoint.every=8 hydra.run.dir=lossy")
    for left in ("summary.json", "model.safetensors"):
        Path("lossy", left).unlink()
    shutil.rmtree("lossy/checkpoints/step_00000016")
    trained(f"{JOB} optimizer=adamw codec=bf16 ranks=2 resume=auto hydra.run.dir=lossy")
    assert answer("audit lossy steps=16", capfd)[0] == 0


def test_steps_after_tests_that_write_to_buffers_are_as_on_record(capfd):
    Path("mine.py").write_text(PLANTED + COUNTED)
    job = JOB.replace("mine.Net", "mine.Counted") + " optimizer=adamw checkpoint.every=3 checkpoint.keep=9"
    trained(f"{job} ranks=2 eval.every=2 hydra.run.dir=run")
    assert "tests change bits, so eval.every= does: in eval mode too a forward writes to calls" in (
        capfd.readouterr().out
    )
    code, shown, _ = answer("audit run steps=8", capfd)
    assert (code, shown.count("as on record")) == (0, 8)


COUNTED = """
class Counted(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, x):
        self.calls += 1
        return super().forward(x * (1 + self.calls / 100))
"""
DRAWN = """
class Dropped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(12, 4)
    def forward(self, x):
        mask = x.new_empty(x.shape)
        return self.layer(x * mask.fill_(0.5))
"""


def test_memory_that_nobody_wrote_to_has_no_digest(capfd):
    Path("mine.py").write_text(PLANTED + DRAWN)
    trained(f"{JOB.replace('mine.Net', 'mine.Dropped')} digest.layers=true optimizer=sgd hydra.run.dir=run")
    line = json.loads(Path("run/digests.jsonl").read_text().splitlines()[0])
    assert "new_empty" not in {row[0] for row in line["layers"]}
    assert answer("audit run steps=3", capfd)[0] == 0


@pytest.mark.slow
def test_no_step_of_a_clean_run_is_accused(capfd):
    trained(f"{JOB} {FAULTY} ranks=3 epochs=25 checkpoint.every=20 checkpoint.keep=99 hydra.run.dir=run")
    code, shown, _ = answer("audit run steps=200", capfd)
    assert code == 0
    assert shown.count("as on record") == 200


def test_a_machine_that_does_not_repeat_itself_is_told_from_the_run(monkeypatch, capfd):
    trained(f"{JOB} {FAULTY} ranks=1 checkpoint.every=5 checkpoint.keep=9 hydra.run.dir=run")
    from penstock.pipeline.run import replay

    real, calls = replay.replayed, iter(("7 256 3", "7 256 4"))

    def faulty(*given, **options):
        monkeypatch.setenv("FLIP", next(calls))
        return real(*given, **options)

    monkeypatch.setattr(replay, "replayed", faulty)
    (audit,) = replay.audited(
        Path("run"), steps=1, seed=next(n for n in range(99) if _drawn(n) == 7), tell=print
    )
    assert audit.difference is not None
    assert not audit.repeats


def _drawn(seed):
    import random

    return random.Random(seed).sample(range(16), 1)[0]


def test_the_first_loss_that_is_no_number_is_found_with_its_layer(monkeypatch, capfd):
    assert train(f"{JOB} ranks=2 optimizer=sgd data.infinite=20 hydra.run.dir=run") == 3
    capfd.readouterr()
    code, shown, _ = answer("replay run step=nan", capfd)
    assert code == 0
    assert "step 2: detect_anomaly=true refuses NaN in the output of a layer" in shown
    assert "that of layer _0, infinite first in the input" in shown
    monkeypatch.setenv("FINITE", "1")
    code, shown, _ = answer("replay run step=nan", capfd)
    assert code == 1
    assert "every value was finite this time" in shown


def test_a_tensor_that_no_file_takes_is_refused_before_training(capfd):
    Path("mine.py").write_text(PLANTED + COMPLEX)
    said = refusal(f"{JOB.replace('mine.Net', 'mine.complex')} ranks=1 hydra.run.dir=run", capfd)
    assert "checkpoints and weights keep phase: safetensors has no torch.complex128; keep this" in said
    assert not Path("run").exists()


COMPLEX = """
def complex():
    net = Net()
    net.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    return net
"""
REFUSED = {
    "replay run": "step= is a number of a step, or nan, found None",
    "replay run step=99": "run has steps 0 to 15 in metrics.jsonl, found step=99",
    "replay run step=1 cuts=[a": "does not fit penstock train",
    "replay run step=1 plan=none.json": "none.json",
    "replay run step=nan": "run has none; name a step",
    "replay run step=1 stagse=2": "Key 'stagse' not in 'TrainConfig'",
    "replay run step=1 stages=x": "could not be converted to Integer",
    "replay run step=1 show=nope": "show=nope: no layer, module or weight has this name",
    "replay run step=1 break=nope": "break=nope: no layer has this name or lies in a module of it",
    "replay run step=1 batch_size=4": "batch_size=4 is another training than run, which had 8",
    "replay run step=1 schedule=async_1f1b": "schedule=async_1f1b is another training than run",
    "replay nowhere step=1": "nowhere is no folder of a run",
    "replay . step=1": "has no config.yaml; name the folder of a run",
    "replay run step=nan show=3": "show= and break= look at a whole step",
    "audit run steps=0": "penstock audit takes steps=, step=, oldest= and seed=, numbers",
    "audit run step=99": "step=99 is not on record in run/digests.jsonl",
    "audit run run": "run run is no folder of a run",
}


def test_what_cannot_be_repeated_is_one_sentence(capfd):
    trained(f"{JOB} ranks=1 hydra.run.dir=run")
    for typed, sentence in REFUSED.items():
        name, _, rest = typed.partition(" ")
        assert sentence in refusal(rest, capfd, name=name), typed
    trained(f"{JOB} ranks=1 stages=2 schedule=async_1f1b digest.every=null hydra.run.dir=stream")
    assert "keeps its cut, found stages=; leave it out" in refusal(
        "stream step=1 stages=1", capfd, name="replay"
    )
    trained(f"{JOB} ranks=2 replicas.count=2 stages=1 hydra.run.dir=replicas")
    assert "train with replicas.exact=true" in refusal("replicas", capfd, name="audit")
    Path("run", "metrics.jsonl").unlink()
    assert "run has no metrics.jsonl" in refusal("run step=nan", capfd, name="replay")
