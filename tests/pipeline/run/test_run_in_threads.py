"""``replicas.threads=true``: a run whose ranks are threads leaves what one of processes does."""

import re
import threading
from pathlib import Path

import pytest
from commands import SMALL, losses, same_run, summary, trained
from faults import ended, started

JOB = (
    f"{SMALL} batch_size=200 micro_batches=4 max_steps=8 optimizer.momentum=0.5 scheduler=cosine epochs=2"
    " checkpoint.every=2 codec=zero_value"
)
THREADS = f"{JOB} replicas.threads=true"


def test_threads_train_to_the_bits_of_one_rank_and_go_on_with_others():
    trained(f"{JOB} ranks=1 stages=2 hydra.run.dir=whole")
    trained(f"{THREADS} ranks=3 replicas.count=[2,1] replicas.exact=true schedule=gpipe hydra.run.dir=run")
    assert [t.name for t in threading.enumerate() if t.name.startswith(("rank", "penstock"))] == []
    assert same_run("run", "whole")
    assert summary("run")["ranks"] == 3
    left = {path.name for path in Path("run").iterdir()}
    assert {"plan.json", "config.yaml", "timeline.png", "checkpoints"} <= left
    (middle,) = Path("run/checkpoints").glob("*6")
    trained(f"{THREADS} ranks=2 replicas.count=2 replicas.exact=true resume={middle} hydra.run.dir=second")
    assert losses("second") == losses("whole")[6:]


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
