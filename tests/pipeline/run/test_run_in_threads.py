"""``replicas.threads=true``: a run whose ranks are threads leaves what one of processes does."""

import re
import threading
from pathlib import Path

import pytest
from faults import ended, started
from runs import SMALL, losses, refusal, same_run, summary, trained

from penstock.compression.errors import ConfigError
from penstock.conf.parts import ReplicasConfig
from penstock.conf.schema import TrainConfig

JOB = (
    f"{SMALL} batch_size=200 micro_batches=4 max_steps=8 optimizer.momentum=0.5 scheduler=cosine epochs=2"
    " checkpoint.every=2 codec=zero_value"
)
THREADS = f"{JOB} replicas.threads=true"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of one rank."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    trained(f"{JOB} ranks=1 stages=2 hydra.run.dir={folder}")
    return folder


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param("ranks=2", marks=pytest.mark.slow),
        pytest.param("ranks=2 replicas.count=2 replicas.exact=true", marks=pytest.mark.slow),
        "ranks=3 replicas.count=[2,1] replicas.exact=true schedule=gpipe",
    ],
)
def test_threads_train_to_the_bits_of_one_rank_and_go_on_with_others(ranks, whole):
    trained(f"{THREADS} {ranks} hydra.run.dir=run")
    assert [t.name for t in threading.enumerate() if t.name.startswith(("rank", "penstock"))] == []
    assert same_run("run", whole)
    assert summary("run")["ranks"] == int(ranks[6])
    left = {path.name for path in Path("run").iterdir()}
    assert {"plan.json", "config.yaml", "timeline.png", "checkpoints"} <= left
    (middle,) = Path("run/checkpoints").glob("*6")
    trained(f"{THREADS} ranks=2 replicas.count=2 replicas.exact=true resume={middle} hydra.run.dir=second")
    assert losses("second") == losses(whole)[6:]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": 1}, "replicas.threads=true gives each rank a thread, found ranks=1"),
        ({"ranks": 2, "max_restarts": 1}, "are lost together, so none is started again"),
    ],
)
def test_what_threads_cannot_be_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        TrainConfig(replicas=ReplicasConfig(threads=True), **options)


def test_a_launcher_and_threads_are_refused_together(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "replicas.threads=true is for ranks that penstock" in refusal(f"{THREADS} ranks=2", capfd)


@pytest.mark.slow
def test_an_error_in_a_thread_is_told_by_rank_and_place_and_leaves_its_traceback(tmp_path):
    more = "ranks=2 replicas.threads=true hydra.run.dir=run"
    code, out, error, seconds = ended(started(tmp_path, more, fault="0 update 5 raise"))
    assert code == 2, out + error
    found = re.fullmatch(
        r"penstock: rank (\d), stage \1, update, step 2: ValueError: sky; its traceback is in (\S+)\n", error
    )
    assert found, error
    assert Path(found[2]).name == f"rank{found[1]}.json"
    assert "raise ValueError" in (tmp_path / found[2]).read_text()
    assert seconds < 100
