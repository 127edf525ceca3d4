"""Two sizes of one suite, as a pytest plugin: the default tests, everything, a part of the rest by a seed.

    pytest                              what is not marked slow, and a sample of the products of the laws
    pytest --all                        everything, with many more cases of the products and of hypothesis
    pytest --shard SEED --minutes 8     what only --all runs, in the order of a seed, until the time is over
    pytest --shard SEED --first 120     exactly the same tests again
    pytest --changed [SINCE]            the default tests whose imports reach what changed since a commit

Nothing is chosen by name or by whether it passes."""

import collections
import fcntl
import functools
import hashlib
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import hypothesis
import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
EXAMPLES = {"default": 30, "all": 500}
"""Examples that hypothesis draws for a property."""

PROGRESS_SECONDS = 15


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("penstock")
    group.addoption("--all", action="store_true", help="everything, the tests marked slow included")
    group.addoption("--seed", help="what draws the sampled cases (default: the commit)")
    group.addoption("--shard", metavar="SEED", help="what only --all runs, in the order of this seed")
    group.addoption("--first", type=int, metavar="N", help="of --shard: only the first so many")
    group.addoption("--minutes", type=float, help="of --shard: begin no test after so many minutes")
    group.addoption(
        "--changed",
        nargs="?",
        const="HEAD",
        metavar="SINCE",
        help="only tests whose imports reach what changed since this commit (default: HEAD)",
    )


def seed_of(config: pytest.Config) -> str:
    """The seed that draws the sampled cases: what was asked for, else the commit, 0 where there is no git."""
    if asked := config.getoption("shard") or config.getoption("seed"):
        return asked
    command = ["git", "-C", str(CHECKOUT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "0"


def number_of(seed: str) -> int:
    """A seed as a number, for generators."""
    return int.from_bytes(hashlib.blake2b(seed.encode(), digest_size=4).digest(), "little")


def is_whole(config: pytest.Config) -> bool:
    """True if the tests of ``--all`` are collected."""
    return config.getoption("all") or config.getoption("shard") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("shard") and (config.getoption("first") or config.getoption("minutes")):
        raise pytest.UsageError("--first and --minutes are parts of --shard SEED; name the seed")
    for name, examples in EXAMPLES.items():
        hypothesis.settings.register_profile(name, max_examples=examples, deadline=None, print_blob=True)
    hypothesis.settings.load_profile("all" if is_whole(config) else "default")
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(number_of(seed_of(config)))
    if config.getoption("minutes") is not None and not hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="shard_")
        config.add_cleanup(functools.partial(shutil.rmtree, folder))
        config.stash[STARTED] = f"{folder}/started"
    if config.option.verbose < 1 and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config), "progress")


STARTED = pytest.StashKey[str]()
"""The file in which a shard keeps when it began and, line by line, how many of its tests have begun."""


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist of the file that all of them share."""
    if STARTED in node.config.stash:
        node.workerinput["started"] = node.config.stash[STARTED]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End well where no test reaches what changed, or a shard has no time for one: none failed."""
    is_part = session.config.getoption("changed") or session.config.getoption("minutes") is not None
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and is_part:
        session.exitstatus = pytest.ExitCode.OK


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the size that was asked for."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    chosen = set(map(id, items if config.getoption("all") else slow))
    kept = [item for item in items if (id(item) in chosen) == is_whole(config)]
    if seed := config.getoption("shard"):
        kept = sorted(kept, key=lambda item: hashlib.sha256(f"{seed}/{item.nodeid}".encode()).digest())
        kept = kept[: config.getoption("first")]
        for number, item in enumerate(kept):
            item.stash[NUMBER] = number
    if since := config.getoption("changed"):
        reached = reached_tests(changed_since(since))
        kept = [item for item in kept if reached is None or item.path in reached]
    left = set(map(id, items)) - set(map(id, kept))
    if left:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in left])
    items[:] = kept
    if hasattr(config, "workeroutput"):
        config.workeroutput["left"] = len(left)  # pyright: ignore[reportAttributeAccessIssue]


NUMBER = pytest.StashKey[int]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Begin no test of a shard when its time is over, unless one behind it has begun: a shard has no gaps."""
    config = item.config
    path = getattr(config, "workerinput", {}).get("started") or config.stash.get(STARTED, None)
    if path is None:
        return None
    with open(path, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        lines = file.read().split()
        if not lines:
            lines = [str(time.time())]
            print(*lines, file=file)
        count, number = max(map(int, lines[1:]), default=0), item.stash[NUMBER]
        if time.time() < float(lines[0]) + 60 * config.option.minutes:
            print(max(count, number + 1), file=file)
            return None
    return None if number < count else True


def changed_since(commit: str) -> set[Path]:
    """The files of the checkout that differ from a commit, and those that git does not know yet."""
    git = ["git", "-C", str(CHECKOUT)]
    names = []
    for command in (
        [*git, "diff", "--name-only", commit],
        [*git, "ls-files", "--others", "--exclude-standard"],
    ):
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found.returncode:
            raise pytest.UsageError(
                f"--changed {commit} is no commit here; name one, as in git log --oneline"
            )
        names += found.stdout.splitlines()
    return {Path(name) for name in names}


def reached_tests(paths: set[Path]) -> set[Path] | None:
    """The test files whose imports reach one of these files; None: all, because nobody can know.

    Pages are what the tests of the house read; another file that is no Python may matter to any test."""
    from imports import reached_from

    pages = {path for path in paths if path.suffix == ".md"}
    if any(path.suffix != ".py" or path.name == "conftest.py" for path in paths - pages):
        return None
    tests = {path.relative_to(CHECKOUT) for path in (CHECKOUT / "tests").rglob("test_*.py")}
    reached = {test for test in tests if paths & reached_from([test])}
    reached |= {test for test in tests if pages and test.parent.name == "house"}
    return {CHECKOUT / test for test in reached}


class Progress:
    """One line in a while: which part, how far, and how long it will take."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.began, self.shown = config, time.monotonic(), time.monotonic()
        self.total = self.done = self.left = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.total = len(ids)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = self.total or len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.left = getattr(node, "workeroutput", {}).get("left", 0)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.left = len(items)

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """No letter for what passed or was skipped: lines of progress stand for them."""
        if report.skipped or (report.passed and report.when == "call"):
            return report.outcome, "", report.outcome.upper()
        return None

    def pytest_runtest_logfinish(self) -> None:
        self.done += 1
        now = time.monotonic()
        if now - self.shown >= PROGRESS_SECONDS and self.total:
            self.shown = now
            took = now - self.began
            rest = took / self.done * (self.total - self.done)
            known = 20 * self.done >= self.total  # the first tests wait for imports and ranks
            self._write(
                f"tests {100 * self.done // self.total:3d} %  {self.done:,} of {self.total:,}, "
                f"{clock(took)} so far" + f", about {clock(rest)} left" * known
            )

    def _write(self, line: str) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter:
            reporter.write_line(line)

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Say what was sampled out of what, how to repeat it, and why tests were skipped."""
        write, seed = terminalreporter.write_line, seed_of(config)
        reasons = collections.Counter(
            str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
            for report in terminalreporter.stats.get("skipped", ())
        )
        if reasons:
            terminalreporter.section(f"{sum(reasons.values())} skipped, and why")
        for reason, number in reasons.most_common():
            write(f"{number:5d}  {reason.removeprefix('Skipped: ')}")
        terminalreporter.section("what ran")
        if STARTED in config.stash:
            file = Path(config.stash[STARTED])
            number = max(map(int, file.read_text().split()[1:]), default=0) if file.exists() else 0
            write(f"{number} of the {self.total:,} tests that only --all runs; the same again:")
            write(f"  ./scripts/check --shard {seed} --first {number}")
        else:
            write(
                f"{self.total:,} tests; {self.left:,} were left out"
                + ("" if is_whole(config) else " (--all)")
            )
            write(f"sampled cases were drawn by --seed {seed}")


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
