"""The command line: every refusal is one sentence that names what was typed, before anything starts."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys

import pytest
from omegaconf import OmegaConf
from processes import ranks_in

from penstock.conf.schema import TrainConfig
from penstock.pipeline.run import train as training
from penstock.pipeline.run.run_folder import RunFolder
from penstock.scripts import application, command, flags, overrides, stopping

SMALL = "model=mlp model.hidden=[8] data.size=8"
BATCH_NORM = "model=resnet18 micro_batches=8"  # of digits so small that a last layer sees one pixel


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    """Runs leave folders where they are started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])


def penstock(typed, capfd):
    """Return exit code, standard output and standard error of ``penstock TYPED``."""
    code = command.run(typed.split())
    return code, *capfd.readouterr()


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("model=resnet19", "resnet19 is not known; model is one of gpt, mlp, own, resnet18, torchvision"),
        ("ranks=99", "ranks=99 is more than"),
        ("schedule=2f2b", "2f2b"),
        ("codec=zip", "zip"),
        ("data=fashion_mnist data.root=/nowhere", "/nowhere"),
        ("micro_batches=0", "micro_batches=0"),
        ("stages=1000", "1000"),
        (
            "no_such_key=1",
            "no_such_key=1: there is no option no_such_key; known are autocast, batch_size, cache",
        ),
        ("+no_such_key=1", "no_such_key=1: there is no option no_such_key"),
        ("+clip.kind=1", "clip.kind=1: there is no option clip.kind"),
        ("weights=stash", "weights is one of latest, stashed, vertical_sync, double_buffered, found 'stash'"),
        ("device=tpu", "device=tpu is not known; known are cpu, cuda, cuda:N and auto"),
        ("memory.tier=disc", "memory.tier is one of device, packed, host, disk, found 'disc'"),
        ("memory.weights=disc", "memory.weights is one of device, packed, host, disk, found 'disc'"),
        ("weights=stashed", "weights=stashed is for weights that change"),
        ("weights=double_buffered stages=3 micro_batches=2", "found micro_batches=2 for 3 stages"),
        (
            "schedule=async_1f1b prediction=true weights=vertical_sync",
            "take weights=latest or weights=stashed",
        ),
        ("schedule=custom program=/nowhere.txt", "program=/nowhere.txt cannot be read"),
        ("schedule=custom", "schedule=custom runs the lines of its program, found none; give program="),
        (
            f"{SMALL} ranks=1 stages=3 weights=double_buffered micro_batches=3 batch_size=2",
            "batch_size=2 is too small for micro_batches=3",
        ),
        (
            f"{SMALL} ranks=1 stages=2 weights=double_buffered batch_size=4 micro_batches=4 "
            "data.drop_last=false",
            "found data.drop_last=false, whose last batch has 1; choose another batch_size",
        ),
        ("rank=1", "did you mean ranks?"),
        ("clip.nrom=1", "did you mean clip.norm?"),
        ("ranks=two", "ranks takes a whole number, not two"),
        (f"{SMALL} optimizer.lr=fast", "optimizer.lr=fast"),
        (f"{SMALL} optimizer.lr=-1", "optimizer.lr=-1"),
        ("deterministic=perhaps", "deterministic takes true or false, not perhaps"),
        ("deadline=soon", "deadline takes a number, not soon"),
        ("ranks=null", "ranks must have a value"),
        ("cuts=layer1", "cuts=[layer1]"),
        ("cuts=[layer1", "cuts=[layer1 cannot be read"),
        ("ranks", "ranks has no value; write ranks=VALUE"),
        ("batch_size=4 micro_batches=8", "batch_size=4 is too small for micro_batches=8"),
        (f"{BATCH_NORM} batch_size=8", "batch_size=8 micro_batches=8 make micro-batches of one sample"),
        ("ranks=3 cuts=[a]", "ranks=3 is more than the 2 stages of cuts=[a]"),
        ("max_steps 3", "max_steps 3 are two words; options are one: max_steps=3"),
        ("max_steps:3", "max_steps:3 has no value; write max_steps=3"),
        ("max-steps=3", "did you mean max_steps? write max_steps=3"),
        ("lr=0.1", "did you mean optimizer.lr? write optimizer.lr=0.1"),
        ("optimizer.lr=abc", "optimizer.lr=abc does not fit: optimizer.lr takes a number, not abc"),
        ("optimizer.lr=null", "optimizer.lr takes a number, not null"),
        ("optimizer.nesterov=perhaps", "optimizer.nesterov takes true or false, not perhaps"),
        ("model=mlp model.hidden=8", "model.hidden takes a list, for example model.hidden=[8]"),
        ("optimizer.nope=3", "there is no option optimizer.nope; known are optimizer.lr"),
        ("optimizer._target_=torch.optim.Adm", "torch.optim.Adm cannot be imported"),
        ("loss=mse", "loss=mse: there is no option loss; known are"),
        ("hydra.run.dri=x", "there is no option hydra.run.dri; known are hydra.run.dir"),
        ("+hydra.foo=3", "there is no option hydra.foo; known are"),
        ("+model.drop_last=true", "there is no option model.drop_last"),
        ("scheduler=none +scheduler.gamma=3", "scheduler.gamma=3 has no target that takes it"),
        (
            "model._target_=torchvision.models.resnet18 model.nope=3",
            "model has no option model.nope=3",
        ),
        ("data=image_folder data.root=/nowhere", "/nowhere must hold train/CLASS/*.png"),
        ("memory.device=lots", "memory.device=lots is not a size in bytes"),
        ("memory.disk=lots", "memory.disk=lots is not a size in bytes"),
        ("memory.disk_per_day=0", "memory.disk_per_day=0 is not a size in bytes"),
        (
            "memory.tier=disk memory.disk=0",
            "memory.disk=0 allows nothing on disk, found memory.tier=disk; raise",
        ),
        (
            "memory.weights=disk memory.disk=0",
            "found memory.weights=disk; raise memory.disk=, or choose another",
        ),
        (
            f"{SMALL} ranks=1 stages=1 memory.tier=disk memory.path=/nowhere",
            "found /nowhere (Not a directory)",
        ),
        ("schedule=zbv stages=3", "found stages=3 for ranks=2; take stages=4"),
        ("--max-steps 3", "--max-steps 3 is written max_steps=3 here"),
        ("--max_steps=3", "--max_steps 3 is written max_steps=3 here"),
        ("--batch-size 4 seed=1", "--batch-size 4 is written batch_size=4 here"),
        ("--lr=0.1", "--lr 0.1 is written optimizer.lr=0.1 here"),
        ("--max-steps", "--max-steps is written max_steps=VALUE here"),
        (
            "-n 2",
            "there is no flag -n; options are KEY=VALUE, for example ranks=2, and penstock train --help",
        ),
        ("--hepl", "there is no flag --hepl; did you mean --help?"),
        ("--multirun --max-steps 3", "written max_steps=3 here"),
        ("--multirun seed=1,2 rank=3", "did you mean ranks? write ranks=3"),
        ("--multirun ranks=1,two", "ranks=two does not fit: ranks takes a whole number, not two"),
        ("--cfg everything", "--cfg takes one of job, hydra, all, found everything; write --cfg job"),
        ("--config-dir", "--config-dir takes a value, found none"),
        ("--config-dir /nowhere", "--config-dir /nowhere is no folder"),
        ("--config-name mine", "--config-name mine: there is no mine.yaml"),
        ("ranks=1,2", "ranks=1,2 is several values"),
        ("ranks=3 stages=2", "ranks=3"),
        ("stages=3 cuts=[layer1]", "stages=3 contradicts cuts=[layer1]"),
        ("cuts=[nowhere]", "nowhere"),
        ("plan=missing.json", "missing.json"),
        ("batch_size=-1", "batch_size=-1"),
        ("batch_size=5000", "batch_size=5000"),
        ("hydra.run.dir=/dev/null/run", "/dev/null/run"),
        ("data=text", "model=gpt"),
        ("model=gpt", "data=text"),
        ("model=torchvision", "model.name= must be given"),
        ("model=torchvision model.name=resnet19", "model.name=resnet19"),
        ("model.width=3", "known are model.init_weights, model.leaves, model.load_weights"),
        ("optimizer=adamw optimizer.momentum=0.9", "known are optimizer.lr, optimizer.weight_decay"),
        (f"{SMALL} optimizer._target_=torch.optim.LBFGS", "LBFGS"),
        (f"{SMALL} scheduler=one_cycle scheduler.pct_start=3", "scheduler.pct_start=3"),
        ("optimizer.lr=${nowhere}", "nowhere"),
        ("model._target_=nowhere.Net", "nowhere.Net"),
        ("model._target_=os.getcwd", "os.getcwd must return a torch module"),
        ("model._target_=torch.nn.Linear model.out_features=3", "needs model.in_features="),
        ("model._target_=torch.nn.Linear model.in_feature=3", "model.in_feature=3; it takes in_features"),
        ("data._target_=os.getcwd", "os.getcwd returns a str; what works is one of: return torch"),
        (f"{SMALL} schedule=gpipe extra_in_flight=1", "extra_in_flight=1"),
        (f"{SMALL} link=fast", "link=fast"),
        (f"{SMALL} memory.device=1KiB", "smallest budget"),
    ],
)
def test_a_refusal_is_one_sentence_that_names_what_was_typed(typed, told, tmp_path, capfd):
    code, out, error = penstock(f"train {typed}", capfd)
    assert code == 2
    assert out == ""
    assert error.startswith("penstock: ")
    assert told in error
    assert error.count("\n") == 1
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in tmp_path.glob("runs/*")]


def test_trying_the_options_leaves_nothing(tmp_path):
    typed = flags.Typed(options=["hydra.run.dir=here/run"])
    application._try("train", TrainConfig, typed, lambda config, options: None)
    assert not (tmp_path / "here" / "run").exists()


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
    for name in command.COMMANDS:
        assert f"penstock {name}" in out
    assert penstock("--version", capfd)[0] == 0
    code, out, error = penstock("trian", capfd)
    assert (code, error) == (
        2,
        "penstock: trian is not a command; known are train, plan, export, cache, bench\n",
    )


def test_a_sweep_that_cannot_be_kept_is_refused_in_one_sentence(capfd):
    code, out, error = penstock(f"plan --multirun {SMALL} seed=1,2 hydra.sweep.dir=/dev/null/sweep", capfd)
    assert (code, out) == (2, "")
    assert error.startswith("penstock: /dev/null/sweep cannot be written (Not a directory)")
    assert error.count("\n") == 1


@pytest.mark.parametrize("typed", ["train", "plan", "bench", "bench codecs"])
def test_every_command_has_its_help(typed, capfd):
    for flag in ("--help", "-h"):
        code, out, error = penstock(f"{typed} {flag}", capfd)
        assert (code, error) == (0, "")
        assert out.startswith(f"penstock {typed} ")
    assert "ranks=2" in out or typed == "bench"


def test_the_whole_configuration_is_printed_on_request(capfd, tmp_path):
    code, out, error = penstock("train --cfg job model=mlp optimizer.lr=0.5", capfd)
    assert (code, error) == (0, "")
    shown = OmegaConf.create(out)
    assert (shown.model.hidden, shown.optimizer.lr, shown.ranks) == ([512, 512], 0.5, 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("typed", "composed"),
    [
        (["ranks=2"], ["ranks=2"]),
        (["model._target_=my.Net"], ["model=own", "model._target_=my.Net"]),
        (
            ["model._target_=my.Net", "model.width=3"],
            ["model=own", "model._target_=my.Net", "++model.width=3"],
        ),
        (["model=mlp", "model._target_=my.Net"], ["model=mlp", "model._target_=my.Net"]),
        (["data._target_=my.data", "model.width=3"], ["data=own", "data._target_=my.data", "model.width=3"]),
        (["--multirun", "seed=1,2"], ["--multirun", "seed=1,2"]),
    ],
)
def test_a_target_of_ones_own_does_not_start_from_our_default(typed, composed):
    assert overrides.with_own_groups(typed) == composed


@pytest.mark.slow
def test_a_plan_is_printed_saved_drawn_and_followed(capfd, tmp_path):
    code, out, _ = penstock("plan model=mlp stages=3 ranks=1 micro_batches=2 hydra.run.dir=here", capfd)
    assert code == 0
    *_, plan, picture = out.splitlines()
    assert (plan, picture) == ("here/plan.json", "here/plan.png")
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert "3 stages on 1 rank" in out
    follow = f"train model=mlp max_steps=1 plan={plan} hydra.run.dir=run"
    for wrong, told in [
        ("ranks=2", "ranks=2 contradicts plan=here/plan.json with ranks=1"),
        ("schedule=gpipe", "schedule=gpipe contradicts plan=here/plan.json with schedule=1f1b"),
        ("micro_batches=8", "micro_batches=8 contradicts plan=here/plan.json with micro_batches=2"),
        ("codec=raw", "codec=raw contradicts plan=here/plan.json with codec=auto"),
        ("memory.tier=host", "memory.tier=host contradicts plan=here/plan.json with memory.tier=device"),
        ("link=1Gbit", "link= is for making a plan"),
        ("memory.device=1GiB", "memory.device= is for making a plan"),
        ("model.hidden=[7]", "plan=here/plan.json"),
    ]:
        code, _, error = penstock(f"{follow} {wrong}", capfd)
        assert code == 2
        assert told in error
    assert penstock(follow, capfd)[0] == 0
    assert (tmp_path / "run" / "plan.json").read_text() == (tmp_path / plan).read_text()
    again = penstock(follow, capfd)
    assert (again[0], again[2]) == (
        2,
        "penstock: hydra.run.dir=run already holds a finished run; choose another folder or remove it\n",
    )


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
    code, _, error = penstock("train graph=true model=mlp", capfd)
    assert code == 2
    assert "graph" in error


def test_a_sweep_runs_every_value_and_tells_which_was_refused(capfd, tmp_path):
    job = f"train --multirun {SMALL} ranks=1 max_steps=1 hydra.sweep.dir=sweep"
    code, out, error = penstock(f"{job} batch_size=5000,16", capfd)
    assert code == 2
    assert "batch_size=5000" in error
    assert out.count("test accuracy") >= 1
    assert (tmp_path / "sweep" / "1" / "summary.json").exists()
    assert not (tmp_path / "sweep" / "0").exists()


def test_the_bench_says_what_it_measured_and_where(capfd, tmp_path):
    job = "classes=[synthetic,job] sizes=[4KiB] densities=[0.5] dtypes=[float32] repeats=1 capture_steps=1"
    code, out, error = penstock(f"bench codecs {job} model=mlp hydra.run.dir=b", capfd)
    assert (code, error) == (0, "")
    assert out.splitlines()[-2:] == ["b/results.json", "b/results.png"]
    results = OmegaConf.load(tmp_path / "b" / "results.json")
    assert results.command == shlex.join(["penstock", "bench", "codecs", *job.split(), "model=mlp"])
    facts = {
        "command",
        "date",
        "hardware",
        "versions",
        "system",
        "threads",
        "isa",
        "load_before",
        "load_after",
    }
    assert results.keys() == facts | {"rows", "overhead"}
    names = list(dict.fromkeys(row.tensor for row in results.rows))
    assert names[0] == "random, density 0.5"
    assert {name.split()[-1] for name in names[1:]} == {"activation", "gradient"}
    assert (tmp_path / "b" / "results.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("bench", "known are cache, checkpoint, codecs"),
        ("bench nothing", "nothing is no topic"),
        ("bench codecs dtypes=[float7]", "float7"),
        ("bench codecs sizes=[big]", "big"),
        ("bench codecs classes=[real]", "real"),
        ("bench codecs codecs=[zip]", "zip"),
        ("bench codecs isa=sse", "sse"),
        ("bench codecs densities=[2]", "found 2"),
        ("bench codecs repeats=0", "repeats=0"),
        ("plan epochs=3", "there is no option epochs"),
        ("plan stages=1000", "1000"),
    ],
)
def test_the_other_commands_refuse_in_the_same_way(typed, told, capfd):
    code, out, error = penstock(typed, capfd)
    assert (code, out) == (2, "")
    assert told in error
    assert error.count("\n") == 1


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch, capfd):
    monkeypatch.setattr(training, "prepare", lambda config: 1 / 0)
    with pytest.raises(SystemExit) as ended:
        command.run(["train"])
    assert ended.value.code == 1
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_ctrl_c_is_one_sentence(monkeypatch, capfd):
    def interrupt(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "prepare", interrupt)
    code, out, error = penstock("train", capfd)
    assert (code, out) == (130, "")
    again = "start it again from the beginning by penstock train"
    assert error == f"penstock: stopped by Ctrl-C; nothing was kept; {again}\n"
    assert error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("number", "ranks", "told"), [(signal.SIGINT, 2, "Ctrl-C"), (signal.SIGHUP, 1, "the end of its terminal")]
)
def test_a_signal_ends_the_ranks_too_and_says_what_is_left(number, ranks, told, tmp_path):
    job = f"train {SMALL} ranks={ranks} epochs=100000 hydra.run.dir=run".split()
    command = [sys.executable, "-m", "penstock.scripts.command", *job]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any(line.startswith("step 1/") for line in process.stdout)
        process.send_signal(number)
        process.stdout.read()
        assert process.wait(timeout=30) == 128 + number
        error = process.stderr.read()
    assert error.startswith(
        f"penstock: stopped by {told}; {tmp_path / 'run'} keeps config.yaml, metrics.jsonl"
    )
    again = shlex.join(["penstock", *job])
    assert re.search(r"plan\.png \(\d+ steps?\), and no checkpoint of the weights; start it again", error)
    assert error.endswith(f"; start it again from the beginning by {again}\n")
    assert error.count("\n") == 1
    assert not ranks_in(tmp_path / "run")


def test_what_an_interrupted_run_kept_is_counted_and_a_bench_is_sent_elsewhere(tmp_path):
    folder = RunFolder(path=tmp_path)
    (tmp_path / "plan.json").touch()
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n{")
    assert stopping.kept(folder, command="penstock train seed=1") == (
        f"{tmp_path} keeps metrics.jsonl, plan.json (2 steps), and no checkpoint of the weights; start it "
        "again from the beginning by penstock train seed=1"
    )
    (tmp_path / "results.json").touch()  # which claims the folder
    told = stopping.kept(folder, command="penstock bench pipeline")
    assert told.endswith(
        "no checkpoint of the weights; to measure again, take another folder (hydra.run.dir=)"
    )


def test_a_stopped_run_with_a_checkpoint_is_told_how_to_go_on(tmp_path):
    folder = RunFolder(path=tmp_path)
    for step, name in ((4, "index.json"), (10, "index.json"), (12, "rank_0_0123abcd.safetensors")):
        made = folder.checkpoints / f"step_{step:08}"
        made.mkdir(parents=True)
        (made / name).touch()
    assert stopping.kept(folder, command=f"penstock train seed=1 hydra.run.dir={tmp_path}") == (
        f"{tmp_path} keeps a checkpoint, step_00000010; go on from it by penstock train seed=1 "
        f"hydra.run.dir={tmp_path} resume=auto"
    )


def deadlock(folder):
    """A program whose ranks wait for each other."""
    (folder / "own.txt").write_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n")
    return f"{SMALL} schedule=custom program=own.txt micro_batches=2"


def test_a_program_that_waits_for_itself_is_neither_trained_nor_planned(tmp_path, capfd):
    code, _, error = penstock(f"train {deadlock(tmp_path)}", capfd)
    assert code == 2
    assert error.startswith("penstock: program=own.txt: the programs wait for each other")
    code, out, error = penstock(f"plan {deadlock(tmp_path)} hydra.run.dir=made", capfd)
    assert (code, out) == (2, "")
    assert "the programs wait for each other" in error
    assert not (tmp_path / "made" / "plan.json").exists()


def test_options_beside_a_plan_are_refused_in_the_words_of_the_command_line(tmp_path, capfd):
    assert penstock(f"plan {SMALL} schedule=async_1f1b hydra.run.dir=made", capfd)[0] == 0
    code, _, error = penstock(f"train {SMALL} plan=made/plan.json clip.norm=1", capfd)
    assert code == 2
    assert "clip.norm=1.0 needs one; add clip.scope=stage" in error


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
FILES = {
    "name.yaml": (f"{SCHEMA}\nrank: 3", "name.yaml: there is no option rank; did you mean ranks?"),
    "nested.yaml": (f"{OURS}\nclip: {{nrom: 3}}", "there is no option clip.nrom; did you mean clip.norm?"),
    "free.yaml": ("ranks: 1\nrnak: 3\nhydra: {run: {dir: x}}", "there is no option rnak; known are autocast"),
    "deep.yaml": (f"{OURS}\nmemory: {{tier: {{x: 1}}}}", "memory.tier"),
    "digits.yaml": (
        f"{OURS}\ndata: {{chanels: 1}}",
        "there is no option data.chanels; known are data.channels",
    ),
    "lone.yaml": (f"{OURS}\noptimizer: {{lr: high}}", "optimizer.lr takes a number, not high"),
    "far.yaml": (f"{OURS}\noptimizer: {{nope: 1}}", "optimizer has no option optimizer.nope=1; it takes"),
    "model/odd.yaml": (
        "_target_: penstock.pipeline.models.mlp\nhidden: [8]\nactivaton: relu",
        "there is no option model.activaton; known are model.activation, model.hidden",
    ),
    "scheduler/odd.yaml": ("gamma: 0.1", "scheduler.gamma=0.1 has no target that takes it"),
    "all/odd.yaml": (
        "# @package _global_\nrankz: 3",
        "odd.yaml: there is no option rankz; did you mean ranks?",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_key_of_ones_own_file_that_nobody_reads_is_refused_by_its_full_name(name, tmp_path, capfd):
    content, told = FILES[name]
    (tmp_path / "own" / name).parent.mkdir(parents=True)
    (tmp_path / "own" / name).write_text(content)
    group, _, file = name.removesuffix(".yaml").rpartition("/")
    chosen = f"--config-name {file}" if not group else f"{'+' * (group == 'all')}{group}={file}"
    code, out, error = penstock(f"train --config-dir own {chosen} hydra.run.dir=run", capfd)
    assert (code, out) == (2, "")
    assert told in error
    assert error.count("\n") == 1
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


EARLY = [
    "train batch_size=4 micro_batches=8",
    "train --max-steps 3",
    "train model=resnet19",
    "train rank=3",
    "train schedule=1f1",
    "train codec=zip",
    "train ranks=99",
    "train ranks=two",
    "train link=fast",
    "train memory.device=lots",
    "train device=tpu",
    "plan device=cuda:x",
    "train weights=stashed",
    "train schedule=gpipe extra_in_flight=1",
    "train schedule=custom program=/nowhere",
    "train plan=/nowhere.json",
    "train optimizer.lr=abc",
    "train data=image_folder data.root=/nowhere",
    "train data=fashion_mnist data.root=/nowhere",
    "train data=text data.path=/nowhere",
    "train model._target_=nowhere.Net",
    "train hydra.run.dir=/dev/null/run",
    "train --multirun seed=1,2 ranks=0",
    "plan schedule=zbv stages=3",
    "bench codecs codecs=[zip]",
    "bench codecs dtypes=[float7]",
    "bench pipeline codecs=[zip]",
    "bench pipeline schedule=nowhere",
    "bench pipeline links=[fast]",
    "bench convergence policies=[lucky]",
]


def test_what_names_counts_and_files_tell_is_refused_before_torch_is_imported(tmp_path):
    script = f"""
import sys
from penstock.scripts import command
for typed in {EARLY}:
    assert command.run(typed.split()) == 2, typed
    assert "torch" not in sys.modules, typed
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == len(EARLY) + 1  # the sweep's two runs are refused one by one
