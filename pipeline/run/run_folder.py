"""The run folder: what a run was asked, what it planned, and what came of it.

Files that other programs read (JSON, YAML, safetensors), each with one name. ``summary.json`` comes last: it
tells a finished run from an interrupted one."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import platform
import re
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from ... import __version__
from ...compression.errors import ConfigError, PenstockError
from ...conf.schema import PlanConfig, TrainConfig
from ...stages.files import reason, refusing, remove_parts, writing
from ..distributed.launcher import private_folder

if TYPE_CHECKING:
    from ...stages.plan.plan import Plan


_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_HOLDER = re.compile(rb"pid \d+ on [\w.-]+")


class _File:
    """Path of a file of a run, by its name in the folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, _: object = None) -> Path:
        return folder.path / self.name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Folder of the files of one run."""

    path: Path

    lock = _File(".lock")  # held by the process whose run it is; there only while it runs
    config = _File("config.yaml")  # the resolved configuration
    plan = _File("plan.json")  # the plan that ran
    plan_picture = _File("plan.png")  # the plan, drawn
    profile = _File("profile.json")  # what was measured of each layer and value, by ``penstock plan``
    graph = _File("graph.json")  # which layer depends on which data; ``graph_picture`` shows it
    graph_picture = _File("graph.png")  # the same, drawn
    memory_table = _File("memory.csv")  # what every layer saves for its backward
    metrics = _File("metrics.jsonl")  # one JSON object a step
    digests = _File("digests.jsonl")  # of what each step left, with digest.every=
    starts = _File("starts.jsonl")  # of each start its first step, options and plan
    world = _File("world.jsonl")  # which rank on which host held what, from which step on; with the former
    summary = _File("summary.json")  # what the closing table shows
    timeline = _File("timeline.png")  # the last step, drawn
    trace = _File("timeline.json")  # the last step, for ui.perfetto.dev
    schedules = _File("schedules.json")  # how the schedules compare; ``schedules_picture`` shows them
    schedules_picture = _File("schedules.png")  # the simulated step of every schedule, drawn
    shares = _File("shares.jsonl")  # by what weight replicas took micro-batches, from which step on
    model = _File("model.safetensors")  # the trained weights under the plain model's names
    first_values = _File("first_values.safetensors")  # of the model; only while a run with a budget goes
    checkpoints = _File("checkpoints")  # a folder for each
    errors = _File("errors")  # what failing ranks left; there only if some did

    @contextlib.contextmanager
    def claim(self, *, resumes: bool = False) -> Iterator[str | None]:
        """Make the folder, or take it over from a run that did not finish, and keep other runs out of it.

        With the block the claim ends, and so does a folder into which nothing was written.

        Args:    resumes: the run that did not finish may go on, so its checkpoints are no hindrance.
        Yields:  what to tell a person where the file system cannot keep others out; else None.
        Raises:  ConfigError: it holds what must stay, another run works in it, or it cannot be written.
        """
        with refusing(self.path):
            lock, missing = self._acquire()
        mark = self.mark()
        try:
            kept = ""
            if self.summary.exists():
                kept = "already holds a finished run; choose another folder or remove it"
            elif self.whole_checkpoints() and not resumes:
                kept = "holds checkpoints of a run that did not finish; go on with it by resume=auto, or "
                kept += "choose another folder"
            elif self.model.exists() and not resumes:
                kept = f"already holds trained weights, {self.model.name}; choose another folder or move them"
            if kept:
                raise ConfigError(f"hydra.run.dir={self.path} {kept}")
            with refusing(self.path):
                self._remove_parts()
            yield missing
        finally:
            with contextlib.suppress(OSError, ConfigError):
                self.check(mark)  # else these are another run's
                self._remove_parts()
                self.lock.unlink()  # while it is held: who opened it before sees that it is gone
            with contextlib.suppress(OSError):
                self.path.rmdir()
            lock.release()

    def _acquire(self) -> tuple[FileLock, str | None]:
        """Hold the lock, which ends with its process; return what ``claim`` yields, too."""
        self.path.mkdir(parents=True, exist_ok=True)
        lock, missing = FileLock(self.lock, timeout=0.2, poll_interval=0.02, fallback_to_soft=False), None
        try:
            lock.acquire()
        except Timeout:
            named = _HOLDER.match(self.lock.read_bytes()[:400])  # anybody may have written into it
            holder = f", {named[0].decode()}" if named else ""
            raise ConfigError(
                f"hydra.run.dir={self.path} is in use by another run{holder}; wait until it ends, or choose "
                "another folder"
            ) from None
        except FileNotFoundError:
            return self._acquire()  # another holder ended, and removed the folder, since it was made
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            missing = f"{self.path} is on a file system without locks ({reason(error)})"
            missing += "; let no other run write into it"
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the name of its holder
            self.lock.write_text(f"pid {os.getpid()} on {socket.gethostname()}")
        return lock, missing

    def begin(self, tell: Callable[[str], None], *, resumes: bool = False) -> None:
        """Remove what an unfinished run left and this one would not write over at once, and say so.

        Args:   resumes: this is that run, which goes on; its metrics stay.
        """
        begun = self.metrics, self.timeline, self.trace, self.shares, self.digests, self.starts, self.world
        left = [*(path for path in begun if path.exists() and not resumes), *self.errors.glob("*")]
        with refusing(self.path):
            for path in left:
                path.unlink()
        if left and not resumes:
            names = ", ".join(str(path.relative_to(self.path)) for path in left)
            tell(f"{self.path} is taken over from a run that did not finish, without its {names}")

    def whole_checkpoints(self) -> list[Path]:
        """The folders of checkpoints that have their index, the newest first."""
        found = [path for path in self.checkpoints.glob("step_*") if (path / "index.json").exists()]
        return sorted(found, key=step_of, reverse=True)

    def mark(self) -> os.stat_result:
        """Return by what ``check`` knows the claimed folder again."""
        with refusing(self.path):
            return self.lock.stat()

    def check(self, mark: os.stat_result) -> None:
        """Refuse to write into a folder that was removed, and may by now be another run's."""
        with contextlib.suppress(OSError):
            if os.path.samestat(mark, self.lock.stat()):  # its holder keeps the number from being given anew
                return
        raise ConfigError(f"{self.path} was removed during this run; leave it alone until the run has ended")

    def save(self, config: PlanConfig, plan: Plan) -> None:
        """Write the resolved configuration, with versions and settings that hold, and the plan, drawn too."""
        self.tell(config, plan)
        plan.draw(self.plan_picture)

    def tell(self, config: PlanConfig, plan: Plan) -> None:
        """Write what ranks need to know."""
        with writing(self.config) as part:
            OmegaConf.save(dataclasses.asdict(config) | self.held_now(config), part)
        plan.save(self.plan)

    @staticmethod
    def held_now(config: PlanConfig) -> dict[str, dict[str, str]]:
        """Return the versions and settings of this process, which decide bits."""
        import torch

        from .determinism import held as settings

        versions = {"penstock": __version__, "torch": str(torch.__version__)}
        versions["python"] = platform.python_version()
        return {"versions": versions, "settings": settings(config)}

    @contextlib.contextmanager
    def private(self) -> Iterator[RunFolder]:
        """A folder that only this user can reach, for what ranks are told: nobody else writes into it.

        What failing ranks leave in its ``errors`` is kept in this folder's, and told as lying there.
        """
        with contextlib.ExitStack() as stack:
            with refusing("a temporary folder (TMPDIR)"):
                folder = RunFolder(path=stack.enter_context(private_folder()))
            try:
                yield folder
            except PenstockError as error:
                with contextlib.suppress(OSError, ConfigError):  # a full disk may be what they failed of
                    for left in folder.errors.glob("*"):
                        self.errors.mkdir(exist_ok=True)
                        with writing(self.errors / left.name) as part:
                            part.write_bytes(left.read_bytes())
                error.args = (str(error).replace(str(folder.errors), str(self.errors)),)
                raise

    def read_config(
        self,
        *,
        without: Collection[str] = (),
        changes: Sequence[str] = (),
        stored: str | None = None,
    ) -> TrainConfig:
        """Return the configuration that ``save`` or ``tell`` wrote, or ``stored``, ``without`` some of its
        options, and with ``changes``, KEY=VALUE."""
        content: Any = OmegaConf.create(self.config.read_text() if stored is None else stored)
        for name in without:
            content.pop(name, None)
        asked = OmegaConf.from_dotlist([*changes])
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), content, asked))
        assert isinstance(config, TrainConfig)
        return config

    def read_summary(self) -> dict[str, Any]:
        """Return what rank 0 left of a finished run."""
        return json.loads(self.summary.read_text())

    def _remove_parts(self) -> None:
        self.first_values.unlink(missing_ok=True)
        for folder in (self.path, self.errors, *self.checkpoints.glob("*")):
            remove_parts(folder)


def step_of(checkpoint: Path) -> int:
    """Number of steps in a checkpoint, by the name of its folder; -1 for another folder."""
    number = checkpoint.name.removeprefix("step_")
    return int(number) if number.isdecimal() else -1
