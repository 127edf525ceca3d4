"""The command line: every refusal is one sentence that names what was typed, before anything starts."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from commands import answer as penstock
from omegaconf import OmegaConf
from processes import ranks_in

from penstock import ConfigError
from penstock.conf.schema import TrainConfig
from penstock.pipeline.run import train as training
from penstock.pipeline.run.run_folder import RunFolder
from penstock.scripts import command, command_line, stopping

SMALL = "model=mlp model.hidden=[8] data.size=8"


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    """Runs leave folders where they are started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])


def refusal(typed, capfd):
    """The one sentence with which ``penstock TYPED`` is refused."""
    code, out, error = penstock(typed, capfd)
    assert (code, out, error.count("\n")) == (command.REFUSED, "", 1), error
    assert error.startswith("penstock: ")
    return error


# What is typed after penstock train, and the subject of the sentence; all of it is refused without torch.
SPELLING = {
    "no_such_key=1": "no_such_key=1: there is no option no_such_key; known are audit, autocast",
    "+clip.kind=1": "clip.kind=1: there is no option clip.kind",
    "rank=1": "did you mean ranks?",
    "guard=true": "did you mean detect_anomaly? write detect_anomaly=true",
    "clip.nrom=1": "did you mean clip.norm?",
    "ranks=two": "ranks=two must be auto, or 1 or more",
    "deterministic=perhaps": "deterministic takes true or false, not perhaps",
    "deadline=soon": "deadline takes a number, not soon",
    "ranks=null": "ranks=null must be auto, or 1 or more",
    "seed=null": "seed must have a value",
    "seed=two": "seed takes a whole number, not two",
    "cuts=layer1": "cuts=[layer1]",
    "cuts=[layer1": "cuts=[layer1 cannot be read",
    "ranks": "write ranks=VALUE",
    "ranks=1,2": "ranks=1,2 is several values",
    "max_steps:3": "write max_steps=3",
    "max-steps=3": "write max_steps=3",
    "lr=0.1": "write optimizer.lr=0.1",
    "optimizer.lr=${nowhere}": "nowhere",
    "optimizer.nope=3": "known are optimizer.lr",
    "optimizer=adamw optimizer.momentum=0.9": "known are optimizer.lr, optimizer.weight_decay",
    "model=mlp model.hidden=8": "model.hidden takes a list, for example model.hidden=[8]",
    "model.width=3": "known are model.init_weights, model.leaves, model.load_weights",
    "model=torchvision": "model.name= must be given",
    "hydra.run.dri=x": "hydra.run.dri; known are hydra.run.dir",
    "+hydra.foo=3": "there is no option hydra.foo; known are",
    "--multirun seed=1,2 rank=3": "write ranks=3",
    "--multirun ranks=1,two": "ranks=two must be auto, or 1 or more",
    "--config-dir /nowhere": "--config-dir /nowhere is no folder",
    "--config-name mine": "there is no mine.yaml",
}
# What is no flag, and the spelling that was meant.
FLAGS = {
    "max_steps 3": "two words; options are one: max_steps=3",
    "--max-steps 3": "--max-steps 3 is written max_steps=3",
    "--max_steps=3": "--max_steps 3 is written max_steps=3",
    "--batch-size 4 seed=1": "--batch-size 4 is written batch_size=4",
    "--lr=0.1": "--lr 0.1 is written optimizer.lr=0.1",
    "--max-steps": "--max-steps is written max_steps=VALUE",
    "-n 2": "there is no flag -n; options are KEY=VALUE",
    "--hepl": "did you mean --help?",
    "--cfg everything": "invalid choice: 'everything' (choose from",
    "--config-dir": "--config-dir/-cd: expected one argument",
}
# Whole commands: a few rows that say that the rules of test_conf.py are asked.
EARLY = {
    "train batch_size=4 micro_batches=8": "batch_size=4",
    "train data=image_folder data.root=/nowhere": "/nowhere must hold train/CLASS",
    "train schedule=custom program=/nowhere": "program=/nowhere cannot be read",
    "train --multirun seed=1 ranks=0 hydra.sweep.dir=swept": "ranks=0",
    "train plan=/nowhere.json": "/nowhere.json",
    "train hydra.run.dir=/dev/null/run": "/dev/null/run",
    "plan device=cuda:x": "device=cuda:x",
    "plan schedule=zbv stages=3": "found stages=3 for ranks=2; take stages=4",
    "plan epochs=3": "there is no option epochs",
    "plan --multirun seed=1,2 hydra.sweep.dir=/dev/null/sweep": "/dev/null/sweep cannot be written",
    "trian": "known are train, plan, export, diff, replay, audit, cache",
    "export": "reads one run or checkpoint, found none",
    "export run run": "reads one run or checkpoint, found run run",
    "export run outptu=a": "no option outptu=a",
    "export run --force": "no option --force",
    "export run output=": "output= names no file",
    "cache": "takes serve or status, found none",
    "cache sevre": "takes serve or status, found sevre",
    "cache serve capcity=1GiB": "no option capcity=1GiB; did you mean capacity=?",
    "cache serve --force": "no option --force; known are capacity=, policy=, page=, keep=, warm_up=, last",
    "cache serve capacity=": "capacity= has no value; write capacity=4GiB",
    "cache serve capacity=much": "capacity=much is not a size in bytes",
    "cache serve page=2MiB capacity=1MiB socket=s": "page=2MiB does not fit: a page has 512 B to 1 MiB",
    "cache serve capacity=900TiB socket=s": "capacity=900 TiB does not fit",
    "cache serve capacity=1KiB socket=s": "capacity=1 KiB is less than a page of 16 KiB",
    "cache serve policy=belady socket=s": "belady",
    "cache serve policy=gain keep=1h socket=s": "keep= is for policy=next_use and policy=lru",
    "cache serve keep=soon socket=s": "keep=soon is not a time",
    "cache serve last_gain=0 socket=s": "last_gain= is for policy=gain, found policy=next_use",
    "cache serve policy=gain last_gain=-1 socket=s": "last_gain=-1 is no number",
    "cache status live=yes": "live takes true or false",
    "cache status capacity=1GiB": "penstock cache status has no option capacity=1GiB",
}
HELP = {
    "--help": "penstock export",
    "train --help": "ranks=2",
    "plan -h": "ranks=2",
    "export --help": "output=FILE",
    "cache --help": "capacity=4GiB",
    "cache serve help": "capacity=4GiB",
}
ASKED = """
import contextlib, io, json, sys
from penstock.scripts import command
answers = {}
for typed in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        code = command.run(typed.split())
    answers[typed] = code, out.getvalue(), error.getvalue(), "torch" in sys.modules
print(json.dumps(answers))
"""


def test_refusals_in_one_sentence_and_help_do_not_wait_for_torch(tmp_path):
    rows = {f"train {typed}": subject for typed, subject in SPELLING.items()} | EARLY | HELP
    done = subprocess.run(
        [sys.executable, "-c", ASKED], input=json.dumps([*rows]), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    for typed, (code, out, error, torch) in json.loads(done.stdout).items():
        assert not torch, typed
        if typed in HELP:
            assert (code, error) == (0, ""), typed
            assert rows[typed] in out, typed
            continue
        assert (code, out, error.count("\n")) == (2, "", 1), typed
        assert error.startswith("penstock: "), typed
        assert rows[typed] in error, (typed, error)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("typed", ["train model=mlp data=digits hydra.run.dir=run", "export run output=o"])
def test_a_limit_of_memory_under_which_torch_does_not_load_is_told_in_one_sentence(typed, tmp_path):
    limited = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29)); "
    run = f"from penstock.scripts.command import run; raise SystemExit(run({typed.split()!r}))"
    command = [sys.executable, "-c", limited + run]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert re.match(r"penstock: a library cannot be loaded: libtorch.*\(ulimit -v\)", done.stderr)


def test_a_flag_that_there_is_not_is_refused_with_the_spelling_that_was_meant():
    for typed, subject in FLAGS.items():
        with pytest.raises(ConfigError, match=re.escape(subject)):
            command_line.parse("train", typed.split(), TrainConfig)


@pytest.mark.parametrize(
    ("typed", "subject"),
    [
        ("batch_size=5000", "batch_size=5000"),
        ("cuts=[nowhere]", "nowhere"),
        ("optimizer.lr=-1", "optimizer.lr=-1"),
        ("memory.device=1KiB", "smallest budget"),
        ("ranks=1 stages=1 memory.tier=disk memory.path=/nowhere", "found /nowhere (Not a directory)"),
        (
            "ranks=1 stages=2 weights=double_buffered batch_size=4 micro_batches=4 data.drop_last=false",
            "found data.drop_last=false, whose last batch has 1; choose another batch_size",
        ),
    ],
)
def test_what_a_model_or_its_data_do_not_allow_is_one_sentence_too(typed, subject, tmp_path, capfd):
    assert subject in refusal(f"train {SMALL} {typed}", capfd)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not list(tmp_path.glob("runs/*"))


def test_a_batch_norm_refuses_micro_batches_of_one_sample(tmp_path, capfd):
    net = "torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 10), torch.nn.BatchNorm1d(10))"
    (tmp_path / "normed.py").write_text(f"import torch\ndef net():\n    return {net}\n")
    job = "model._target_=normed.net data.size=8 ranks=1 stages=1 batch_size=8 micro_batches=8"
    assert "batch_size=8 micro_batches=8 make micro-batches of one sample" in refusal(f"train {job}", capfd)


@pytest.mark.slow
def test_two_runs_of_one_moment_have_a_folder_each(tmp_path, capfd):
    for typed in ("", "--multirun seed=1,2"):
        job = f"plan {typed} {SMALL} ranks=1"
        assert [penstock(job, capfd)[0] for _ in range(2)] == [0, 0]
    one, other, *sweeps = sorted((tmp_path / "runs").iterdir())
    for folder in (one, other, *sweeps):
        assert folder.name.endswith(f"-{os.getpid()}")  # of two processes never the same
    assert [(folder / "plan.json").exists() for folder in (one, other)] == [True, True]
    assert [(folder / "1" / "plan.json").exists() for folder in sweeps] == [True, True]


def test_without_a_command_the_commands_are_listed(capfd):
    assert penstock("", capfd)[::2] == (2, "")
    code, out, error = penstock("--help", capfd)
    assert (code, error) == (0, "")
    assert all(f"penstock {name}" in out for name in command.COMMANDS)
    assert penstock("--version", capfd)[0] == 0


def test_the_whole_configuration_is_printed_on_request(capfd, tmp_path):
    code, out, error = penstock("train --cfg job model=mlp optimizer.lr=0.5", capfd)
    assert (code, error) == (0, "")
    shown = OmegaConf.create(out)
    assert (shown.model.hidden, shown.optimizer.lr, shown.ranks) == ([512, 512], 0.5, 2)
    assert not list(tmp_path.iterdir())


def test_a_working_folder_that_was_removed_is_told(tmp_path, monkeypatch, capfd):
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "this one was removed; go to another" in refusal("train max_steps=1", capfd)


@pytest.mark.parametrize(
    ("typed", "composed"),
    [
        ("ranks=2", "ranks=2"),
        ("model._target_=my.Net", "model=own model._target_=my.Net"),
        ("model._target_=my.Net model.width=3", "model=own model._target_=my.Net ++model.width=3"),
        ("model=mlp model._target_=my.Net", "model=mlp model._target_=my.Net"),
        ("data._target_=my.data model.width=3", "data=own data._target_=my.data model.width=3"),
        ("--multirun seed=1,2", "--multirun seed=1,2"),
        (
            "optimizer=adam optimizer.lr=1",
            "optimizer=own optimizer._target_=torch.optim.adam ++optimizer.lr=1",
        ),
        ("optimizer=AdamW loss=own scheduler=null", "optimizer=adamw loss=own scheduler=null"),
        ("model=resnet50 model.leaves=[]", "model=torchvision model.name=resnet50 model.leaves=[]"),
        ("model=mine data=cifar10", "model=mine data=cifar10"),
    ],
)
def test_a_target_of_ones_own_or_of_torch_does_not_start_from_our_default(typed, composed, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").touch()
    folders = [str(tmp_path)]
    named = [one for word in typed.split() for one in command_line.with_named_target(word, folders)]
    assert command_line.with_own_groups(named) == composed.split()


@pytest.mark.slow
def test_a_plan_shows_its_dependencies_and_what_fills_the_memory(capfd, tmp_path):
    job = "plan model=mlp ranks=1 stages=2 batch_size=16 micro_batches=2 hydra.run.dir=here"
    code, plain, _ = penstock(job, capfd)
    assert code == 0
    assert not list((tmp_path / "here").glob("graph*"))
    code, out, error = penstock(f"{job} graph=true memory.table=true", capfd)
    assert (code, error) == (0, "")
    files = ["plan.json", "plan.png", "graph.json", "graph.png", "memory.csv"]
    assert out.splitlines()[-5:] == [f"here/{name}" for name in files]
    assert plain.splitlines()[-2:] == ["here/plan.json", "here/plan.png"]
    plan, graph = (OmegaConf.load(tmp_path / "here" / name) for name in ("plan.json", "graph.json"))
    names = [layer for stage in plan.stages for layer in stage.layers]
    assert [layer.name for layer in graph.layers] == names
    rows = [line.split(",") for line in (tmp_path / "here" / "memory.csv").read_text().splitlines()]
    saved = [sum(int(r[10]) for r in rows[1:] if r[:1] == [str(n)] and r[5] == "saved") for n in range(2)]
    assert saved == [stage.saved_bytes for stage in plan.stages]
    assert "saved, weights" in out
    assert "graph" in refusal("train graph=true model=mlp", capfd)


def test_a_sweep_runs_every_value_and_tells_which_was_refused(capfd, tmp_path):
    job = f"train --multirun {SMALL} ranks=1 max_steps=1 hydra.sweep.dir=sweep"
    code, out, error = penstock(f"{job} batch_size=5000,16", capfd)
    assert code == 2
    assert "batch_size=5000" in error
    assert out.count("test accuracy") >= 1
    assert (tmp_path / "sweep" / "1" / "summary.json").exists()
    assert not (tmp_path / "sweep" / "0").exists()
    assert not (tmp_path / "sweep" / "sweep.png").exists()
    job = job.replace("max_steps=1 hydra.sweep.dir=sweep", "max_steps=2 hydra.sweep.dir=two")
    code, out, _ = penstock(f"{job} optimizer.lr=0.1,0.2 seed=1,2", capfd)
    assert code == 0
    *_, heads, first, second, third, fourth, picture = out.splitlines()
    assert heads.split()[:3] == ["run", "options", "samples/s"]
    for number, (row, lr, seed) in enumerate(
        zip((first, second, third, fourth), ("0.1", "0.1", "0.2", "0.2"), "1212", strict=True)
    ):
        summary = json.loads((tmp_path / "two" / str(number) / "summary.json").read_text())
        assert row.split()[:3] == [str(number), f"optimizer.lr={lr}", f"seed={seed}"]
        assert row.split()[-2:] == [f"{summary['loss']:.4f}", f"{summary['test_accuracy']:.2%}"]
    assert picture == "two/sweep.png"
    assert (tmp_path / picture).stat().st_size > 10_000
    job = job.replace("hydra.sweep.dir=two", "hydra.sweep.dir=three")
    code, out, _ = penstock(f"{job} optimizer.lr=0.1,1e38 epochs=1", capfd)
    assert code == 3
    assert out.splitlines()[-2].split()[-2:] == ["-", "-"]  # neither loss nor accuracy


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(training, "prepare", lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command.run(["train"])


def test_ctrl_c_is_one_sentence(monkeypatch, capfd):
    def interrupt(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "prepare", interrupt)
    code, out, error = penstock("train", capfd)
    assert (code, out, error.count("\n")) == (130, "", 1)
    assert "stopped by Ctrl-C; nothing was kept; start it again from the beginning by penstock train" in error


@pytest.mark.slow
@pytest.mark.ranks
def test_the_end_of_a_terminal_ends_the_ranks_too_and_says_what_is_left(tmp_path):
    job = f"train {SMALL} ranks=2 epochs=100000 hydra.run.dir=run".split()
    command = [sys.executable, "-m", "penstock.scripts.command", *job]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any(line.startswith("step 1/") for line in process.stdout)
        process.send_signal(signal.SIGHUP)
        process.stdout.read()
        assert process.wait(timeout=30) == 128 + signal.SIGHUP
        error = process.stderr.read()
    kept = f"stopped by the end of its terminal; {tmp_path / 'run'} keeps config.yaml, metrics.jsonl"
    assert kept in error
    assert re.search(r"plan\.png \(\d+ steps?\), and no checkpoint of the weights; start it again", error)
    assert error.endswith(f"; start it again from the beginning by {shlex.join(['penstock', *job])}\n")
    assert error.count("\n") == 1
    assert not ranks_in(tmp_path / "run")


LONG_LAYER = """
import sys
import torch
from penstock.scripts import command, train
torch.set_num_threads(1)
weights = torch.zeros(9000, 9000)
def long(arguments):
    print("begins", flush=True)
    while True:
        weights @ weights
train.main = long
sys.argv = ["penstock", "train"]
command.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_ends_a_command_in_the_middle_of_a_long_layer(again):
    typed, pipe = [sys.executable, "-c", LONG_LAYER], subprocess.PIPE
    with subprocess.Popen(typed, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        time.sleep(0.5)  # until it is in the middle
        process.send_signal(signal.SIGINT)
        if again:  # at once
            process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    assert process.returncode in ((130, 143) if again else (130,))  # the system tells two in any order
    assert error.startswith("penstock: stopped by Ctrl-C, and cut off") != again


def test_what_a_stopped_run_kept_is_counted_and_how_to_go_on_is_told(tmp_path):
    folder, typed = RunFolder(path=tmp_path), f"penstock train seed=1 hydra.run.dir={tmp_path}"
    (tmp_path / "plan.json").touch()
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n{")
    kept = f"{tmp_path} keeps metrics.jsonl, plan.json (2 steps), and no checkpoint of the weights; "
    assert stopping.kept(folder, command=typed) == f"{kept}start it again from the beginning by {typed}"
    for step, name in ((4, "index.json"), (10, "index.json"), (12, "rank_0_0123abcd.safetensors")):
        (folder.checkpoints / f"step_{step:08}").mkdir(parents=True)
        (folder.checkpoints / f"step_{step:08}" / name).touch()
    kept = f"{tmp_path} keeps a checkpoint, step_00000010; go on from it by "
    assert stopping.kept(folder, command=typed) == f"{kept}{typed} resume=auto"


def test_a_program_that_waits_for_itself_is_neither_trained_nor_planned(tmp_path, capfd):
    (tmp_path / "own.txt").write_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n")
    waits = "the programs wait for each other"
    for typed, subject in (("train", f"program=own.txt: {waits}"), ("plan hydra.run.dir=made", waits)):
        assert subject in refusal(f"{typed} {SMALL} schedule=custom program=own.txt micro_batches=2", capfd)
    assert not (tmp_path / "made" / "plan.json").exists()


SCHEMA = """
defaults:
  - train_schema
  - model: resnet18
  - data: digits
  - optimizer: sgd
  - scheduler: cosine
  - override hydra/job_logging: none
  - override hydra/hydra_logging: none
  - _self_
"""
OURS = "defaults: [train, _self_]"
FILES = {  # name -> (text, subject)
    "name.yaml": (f"{SCHEMA}\nrank: 3", "name.yaml: there is no option rank; did you mean ranks?"),
    "nested.yaml": (f"{OURS}\nclip: {{nrom: 3}}", "there is no option clip.nrom; did you mean clip.norm?"),
    "free.yaml": ("ranks: 1\nrnak: 3\nhydra: {run: {dir: x}}", "there is no option rnak; known are audit"),
    "deep.yaml": (f"{OURS}\nmemory: {{tier: {{x: 1}}}}", "memory.tier"),
    "digits.yaml": (f"{OURS}\ndata: {{chanels: 1}}", "data.chanels; known are data.channels"),
    "lone.yaml": (f"{OURS}\noptimizer: {{lr: high}}", "optimizer.lr takes a number, not high"),
    "far.yaml": (f"{OURS}\noptimizer: {{nope: 1}}", "optimizer has no option optimizer.nope=1; it takes"),
    "model/odd.yaml": ("_target_: penstock.pipeline.models.mlp\nactivaton: 1", "model.activaton"),
    "scheduler/odd.yaml": ("gamma: 0.1", "scheduler.gamma=0.1 has no target that takes it"),
    "all/odd.yaml": ("# @package _global_\nrankz: 3", "odd.yaml: there is no option rankz; did you mean"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_key_of_ones_own_file_that_nobody_reads_is_refused_by_its_full_name(name, tmp_path, capfd):
    text, subject = FILES[name]
    (tmp_path / "own" / name).parent.mkdir(parents=True)
    (tmp_path / "own" / name).write_text(text)
    group, _, file = name.removesuffix(".yaml").rpartition("/")
    chosen = f"--config-name {file}" if not group else f"{'+' * (group == 'all')}{group}={file}"
    assert subject in refusal(f"train --config-dir own {chosen} hydra.run.dir=run", capfd)
    assert not (tmp_path / "run").exists()


def test_a_configuration_of_ones_own_trains(tmp_path, capfd):
    (tmp_path / "own" / "model").mkdir(parents=True)
    (tmp_path / "own" / "mine.yaml").write_text(f"{OURS}\nmax_steps: 2\nranks: 1\ndata: {{size: 8}}")
    target = "_target_: penstock.pipeline.models.mlp"
    (tmp_path / "own" / "model" / "tiny.yaml").write_text(f"{target}\nhidden: [8]\nactivation: relu")
    typed = "train --config-dir own --config-name mine model=tiny hydra.run.dir=run"
    code, _, error = penstock(typed, capfd)
    assert (code, error) == (0, "")
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").model.hidden == [8]
