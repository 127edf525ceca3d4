"""The two sizes of the suite: what runs by default, with --all, and as a part of the rest."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import CHECKOUT, reached_tests

SUPPORT = Path(__file__).resolve().parents[1] / "support"
SUITE = """
import time
import pytest
from hypothesis import given, settings, strategies

@pytest.mark.parametrize("number", range(3))
def test_quick(number):
    pass

@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_slow(number, request):
    time.sleep(0.4)

@given(strategies.integers())
def test_examples(number):
    print("examples", settings.default.max_examples)

def test_without_what_it_needs():
    pytest.skip("needs a GPU")
"""


@pytest.fixture
def suite(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: belongs to --all alone\n")

    def run(*options):
        command = [sys.executable, *"-m pytest -p sampling -p no:cacheprovider -rA".split(), *options]
        surroundings = {"PYTHONPATH": str(SUPPORT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
        done = subprocess.run(
            command, cwd=tmp_path, env=surroundings, capture_output=True, text=True, timeout=60
        )
        return done.returncode, re.findall(r"PASSED \S+::(\S+)", done.stdout), done.stdout + done.stderr

    return run


def test_slow_tests_are_left_to_all(suite):
    code, names, text = suite("--seed", "five")
    assert (code, len(names)) == (0, 4)
    assert not any("slow" in name for name in names)
    assert "examples 30\n" in text
    assert "1  needs a GPU" in text
    assert "--seed five" in text
    code, names, text = suite("--all")
    assert (code, len(names)) == (0, 24)
    assert "examples 500\n" in text


@pytest.mark.slow
def test_a_shard_is_in_the_order_of_its_seed_and_says_what_runs_the_same_again(suite):
    parallel = "-n", "2", "--dist", "load", "--maxschedchunk", "1"
    code, names, text = suite("--shard", "five", "--minutes", "0.03", *parallel)
    assert code == 0
    assert 0 < len(names) < 20
    assert all("slow" in name for name in names)
    line = re.search(r"check (--shard five --first \d+)", text)
    assert line is not None
    _, again, _ = suite(*line[1].split())
    assert set(names) == set(again)
    _, other, _ = suite(*line[1].replace("five", "six").split())
    assert len(other) == len(again)
    assert other != again


def test_parts_of_a_shard_without_one_are_refused(suite):
    code, _, text = suite("--minutes", "8")
    assert code == 4
    assert "--shard SEED" in text


@pytest.mark.parametrize(
    ("changed", "reached", "not_reached"),
    [
        ("compression/narrow.py", "compression/test_narrow.py", "house/test_sampling.py"),
        (
            "pipeline/data/cache/core.py",
            "pipeline/data/cache/test_cache_core.py",
            "compression/test_frame.py",
        ),
        ("tests/support/zoo.py", "laws/test_product.py", "compression/test_frame.py"),
        ("README.md", "house/test_readme.py", "laws/test_product.py"),
    ],
)
def test_a_change_runs_the_tests_whose_imports_reach_it(changed, reached, not_reached):
    tests = reached_tests({Path(changed)})
    assert CHECKOUT / "tests" / reached in tests
    assert CHECKOUT / "tests" / not_reached not in tests


@pytest.mark.parametrize("changed", ["setup.cfg", "tests/conftest.py", "conf/model/mlp.yaml"])
def test_a_change_that_may_matter_to_any_test_runs_all(changed):
    assert reached_tests({Path(changed), Path("README.md")}) is None
