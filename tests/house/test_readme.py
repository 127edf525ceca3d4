"""The README and the pages of docs/ run as they stand: every block, every command, every link.

A block is identified by its fence: a new one is tried at once, or fails as one that no test knows how to try.
"""

import functools
import re
import shlex
from pathlib import Path
from typing import Any

import hydra
import pytest
from checkout import ROOT, files, run
from hydra.core.config_store import ConfigStore

from penstock.conf.schema import PlanningConfig, TrainConfig
from penstock.pipeline.schedules import SCHEDULES
from penstock.scripts import application, command, command_line
from penstock.stages.weight_versions.policies import POLICIES

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = [ROOT / "scripts" / name for name in ("check-gpu", "versions")]  # which name tests
DRAWN = {"docs/architecture.md"}  # its blocks without a language are drawings
SCHEMAS = {"train": TrainConfig, "plan": PlanningConfig}

# Commands that other tests run as they stand, or that only a person can run.
ELSEWHERE = {
    "./scripts/quickstart": "test_quickstart.py",
    "./scripts/check": "what runs this test",
    ". .venv/bin/activate": "test_quickstart.py",
    "sbatch --nodes=2 scripts/slurm.sbatch model=resnet18 checkpoint.minutes=10": "test_examples.py",
    "pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu": "a person's network",
    "pip install ./penstock": "test_quickstart.py, in the checkout itself",
    "pip install jupyterlab && jupyter lab scripts/notebooks/throughput.ipynb": "test_notebook.py",
}
RUN = ("penstock", "torchrun")  # whose options are read here; test_launched.py runs torchrun
EXPORT = "export "  # reads what the run left whose lines stand above it
BENCH = "python scripts/bench/"  # test_benches.py reads their options
DIFF = "(?:diff|replay|audit)"  # test_digests.py and test_audit.py run them
CACHE = "cache "  # takes no flags: test_export_and_cache.py runs all of it
# What a line needs so that it ends soon; the last of two settings counts.
SHORT = "epochs=1 max_steps=1 hydra.run.dir=run"
PACKAGE = """
import torch
from penstock.pipeline.data import digits

class MyNet(torch.nn.Sequential):
    def __init__(self):
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(3072, 10), torch.nn.ReLU())

def my_data():
    return digits.load()
"""


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [code for kind, code in found if kind == language and name(page) not in DRAWN]


def lines() -> list[str]:
    """Every command of a block, without its comment."""
    found = [line.partition(" #")[0].strip() for p in PAGES for b in blocks(p, "") for line in b.splitlines()]
    return list(dict.fromkeys(" ".join(line.split()) for line in found if line))


def commands() -> list[str]:
    """The commands of blocks, torchrun's too, and those in the text; ``=N`` is a place to fill."""
    typed = [re.sub("^torchrun .* -m penstock", "penstock", line) for line in lines()]
    inline = [
        " ".join(code.split()) for p in PAGES for code in re.findall(r"`(penstock [^`]+)`", p.read_text())
    ]
    return [
        c
        for c in dict.fromkeys([*typed, *inline])
        if re.match(rf"penstock (?!{EXPORT}|{CACHE}|{DIFF})(?!.*=N$)", c)
    ]


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Output of Python, started with some words in a clean folder."""
    return functools.partial(run, cwd=tmp_path, OMP_NUM_THREADS="1")


def blocks_to_run() -> list[Any]:
    """The first block is tried by default, each other one with ``--all``."""
    return [
        pytest.param(
            code, id=f"{name(page)}-{number}", marks=[pytest.mark.slow] * bool(number or page != README)
        )
        for page in PAGES
        for number, code in enumerate(blocks(page, "python"))
    ]


@pytest.mark.parametrize("code", blocks_to_run())
def test_python_runs_as_it_stands(code, start):
    out = start("-c", code)
    if "partition(" in code or "Pipeline.of(" in code:
        assert re.search(r"^step 0: loss \d\.\d+, \d+ samples", out, flags=re.MULTILINE)
    if "offload(" in code:
        assert float(out.splitlines()[-1]) > 1.2  # on batch norm and ReLU


def test_every_line_has_a_test():
    assert len(lines()) > 15
    tested = [line for line in lines() if line.startswith(BENCH) or line.split()[0] in RUN]
    assert [line for line in lines() if line not in [*ELSEWHERE, *tested]] == []
    assert [line for line in ELSEWHERE if line not in lines()] == []


@pytest.mark.parametrize("typed", commands())
def test_a_command_is_not_refused(typed, capsys):
    words = shlex.split(typed)[1:]
    if "--help" in words:
        assert command.run(words) == 0, capsys.readouterr().err
        return
    named = words.pop(0)
    schema = SCHEMAS[named]
    ConfigStore.instance().store(name=f"{named}_schema", node=schema)
    options = command_line.parse(named, words, schema).overrides
    with hydra.initialize_config_module("penstock.conf", version_base="1.3"):
        application.checked(hydra.compose(named, overrides=options), schema)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("typed", [c for c in commands() if c in lines() and "DATE_TIME" not in c])
def test_a_command_runs(typed, tmp_path, start):
    (tmp_path / "my_package.py").write_text(PACKAGE)
    (tmp_path / "machines.yaml").write_text(blocks(ROOT / "docs/machines.md", "yaml")[0])
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    words = shlex.split(typed)
    data = next((Path(word[10:]) for word in words if word.startswith("data.root=")), None)
    if data and not data.is_dir():
        pytest.skip(f"no data in {data}")
    small = shlex.split(SHORT) if words[1] == "train" else ["hydra.run.dir=run"]
    small += ["micro_batches=2"] if "program=mine.csv" in words else []
    start("-m", "penstock.scripts.command", *words[1:], *([] if "--help" in words else small))


@pytest.mark.slow
@pytest.mark.ranks
def test_the_lines_of_a_run_that_survives_follow_each_other(tmp_path, start):
    (block,) = [block for block in blocks(README, "") if "checkpoint.every" in block]
    first, again, export = [shlex.split(line, comments=True)[1:] for line in block.splitlines()]
    assert again == [*first, "resume=auto"]
    small = "data.size=16 batch_size=32 micro_batches=4 max_steps=12".split()
    start("-m", "penstock", *first, *small)
    for name in ("summary.json", "model.safetensors"):  # as of one that was killed behind its last step
        (tmp_path / "runs" / "mine" / name).unlink()
    assert "goes on behind step 10 of 12" in start("-m", "penstock", *again, *small)
    start("-m", "penstock", *export)
    assert (tmp_path / "mine.safetensors").is_file()


def test_every_schedule_and_policy_has_a_row():
    page = (ROOT / "docs" / "schedules.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)(?:=true)?` \|", page, flags=re.MULTILINE))
    assert {*SCHEDULES, *POLICIES, "prediction"} <= rows


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_points_to_is_there(page):
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target


NAMED = re.compile(r"(?<![\w/.*<-])((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b")


def missing(text: str) -> set[str]:
    """The files of Python that a text names and that are not there."""
    there = [f"/{file}" for file in files()]
    return {name for name in NAMED.findall(text) if not any(file.endswith(f"/{name}") for file in there)}


def test_the_files_that_a_page_names_exist():
    assert missing("`stages/nowhere.py`, engine.py") == {"stages/nowhere.py"}
    assert missing("".join(page.read_text() for page in [*PAGES, *SCRIPTS])) == {
        "first_pipeline.py",
        "my_package.py",
    }  # which readers write
