"""What the README shows first runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import test_asynchronous
import test_same_bits
import test_same_bits_on_ranks

from penstock.pipeline.schedules import SCHEDULES
from penstock.stages.plan import WEIGHTS

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_python_lines_run_as_they_stand(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks[0].strip().splitlines()) <= 6
    code = "".join(blocks)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2 stages on 2 ranks" in done.stdout
    assert re.search(r"step 0: loss \d\.\d+, 64 samples", done.stdout)
    assert float(done.stdout.splitlines()[-1]) > 1.2  # offload, on batch norm and ReLU


def test_every_schedule_and_policy_has_a_row_and_a_law_behind_it():
    rows = set(re.findall(r"^\| `(\w+)(?:=true)?` \|", README.read_text(), flags=re.MULTILINE))
    assert {*SCHEDULES, *WEIGHTS, "prediction"} <= rows
    tested = {case.schedule for case in test_same_bits.CASES}
    assert (
        tested == {case.schedule for case in test_same_bits_on_ranks.CASES} == {*SCHEDULES} - {"async_1f1b"}
    )
    assert {case.weights for case in test_asynchronous.CASES} == {*WEIGHTS}
    assert {case.prediction for case in test_asynchronous.CASES} == {True, False}


def test_what_the_readme_points_to_is_there():
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert target.startswith("http") or (README.parent / target).exists(), target
