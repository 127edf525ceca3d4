"""The run folder: what a run was asked, what it planned, and what came of it.

Files that other programs read (JSON, YAML, safetensors), each with one name. ``summary.json`` comes last: it
tells a finished run from an interrupted one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from ... import __version__
from ...compression.errors import ConfigError, PenstockError
from ...conf.schema import PlanConfig, TrainConfig
from ...stages.files import refusing, remove_parts, writing
from ..distributed.launcher import private_folder
from .lock import held

if TYPE_CHECKING:
    from ...stages.plan.plan import Plan


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
    graph = _File("graph.json")  # which layer depends on which data; ``graph_picture`` shows it
    graph_picture = _File("graph.png")  # the same, drawn
    memory_table = _File("memory.csv")  # what every layer saves for its backward
    metrics = _File("metrics.jsonl")  # one JSON object a step
    summary = _File("summary.json")  # what the closing table shows
    timeline = _File("timeline.png")  # the last step, drawn
    trace = _File("timeline.json")  # the last step, for ui.perfetto.dev
    schedules = _File("schedules.json")  # how the schedules compare; ``schedules_picture`` shows them
    schedules_picture = _File("schedules.png")  # the simulated step of every schedule, drawn
    shares = _File("shares.jsonl")  # by what weight replicas took micro-batches, from which step on
    model = _File("model.safetensors")  # the trained weights under the plain model's names
    checkpoints = _File("checkpoints")  # a folder for each
    errors = _File("errors")  # what failing ranks left; there only if some did

    @contextlib.contextmanager
    def claim(self, *, resumes: bool = False) -> Iterator[str | None]:
        """Make the folder, or take it over from a run that did not finish, and keep other runs out of it.

        With the block the claim ends, and so does a folder into which nothing was written.

        Args:    resumes: the run that did not finish may go on, so its checkpoints are no hindrance.
        Returns: what to tell a person where the file system cannot keep others out; else None.
        Raises:  ConfigError: it holds a finished run or checkpoints, another run works in it, or it cannot
                 be written.
        """
        with contextlib.ExitStack() as claimed:
            with refusing(self.path):
                missing = claimed.enter_context(held(self.lock))
                self._refuse_finished()
                if not resumes:
                    self._refuse_kept()
                self._remove_parts()
            claimed.callback(self._leave, self.mark())
            yield missing

    def begin(self, tell: Callable[[str], None], *, resumes: bool = False) -> None:
        """Remove what an unfinished run left and this one would not write over at once.

        Args:   tell: is called with a sentence if there is any.
                resumes: this is that run, which goes on; its metrics stay.
        Raises: ConfigError: it cannot be removed.
        """
        begun = () if resumes else (self.metrics, self.timeline, self.trace, self.shares)
        left = [*(path for path in begun if path.exists()), *self.errors.glob("*")]
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
        """Refuse to write into a folder that was removed, and may by now be another run's.

        Raises: ConfigError: it was.
        """
        with contextlib.suppress(OSError):
            if os.path.samestat(mark, self.lock.stat()):  # its holder keeps the number from being given anew
                return
        raise ConfigError(
            f"{self.path} was removed while this run wrote into it; leave it alone until the run has ended"
        )

    def save(self, config: PlanConfig, plan: Plan) -> None:
        """Write the resolved configuration, with versions and settings that hold, and the plan, drawn too."""
        self.tell(config, plan)
        plan.draw(self.plan_picture)

    def tell(self, config: PlanConfig, plan: Plan) -> None:
        """Write what ranks need to know."""
        import torch

        from .determinism import held as settings

        content = dataclasses.asdict(config)
        content["versions"] = {
            "penstock": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }
        content["settings"] = settings(config)
        with writing(self.config) as part:
            OmegaConf.save(content, part)
        plan.save(self.plan)

    @contextlib.contextmanager
    def private(self) -> Iterator[RunFolder]:
        """A folder that only this user can reach, for what ranks are told: nobody else writes into it.

        What failing ranks leave in its ``errors`` is kept in this folder's, and told as lying there.
        """
        with contextlib.ExitStack() as made:
            with refusing("a temporary folder (TMPDIR)"):
                told = RunFolder(path=made.enter_context(private_folder()))
            try:
                yield told
            except PenstockError as error:
                with contextlib.suppress(OSError, ConfigError):  # a full disk may be what they failed of
                    self._keep_errors(told)
                error.args = (str(error).replace(str(told.errors), str(self.errors)),)
                raise

    def read_config(self) -> TrainConfig:
        """Return the configuration that ``save`` or ``tell`` wrote."""
        content = OmegaConf.create(self.config.read_text())
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), content))
        assert isinstance(config, TrainConfig)
        return config

    def read_summary(self) -> dict[str, Any]:
        """Return what rank 0 left of a finished run."""
        return json.loads(self.summary.read_text())

    def _refuse_finished(self) -> None:
        if self.summary.exists():
            raise ConfigError(
                f"hydra.run.dir={self.path} already holds a finished run; choose another folder or remove it"
            )

    def _refuse_kept(self) -> None:
        if self.whole_checkpoints():
            raise ConfigError(
                f"hydra.run.dir={self.path} holds checkpoints of a run that did not finish; go on with it by "
                "resume=auto, or choose another folder"
            )
        if self.model.exists():
            raise ConfigError(
                f"hydra.run.dir={self.path} already holds trained weights, {self.model.name}; choose another "
                "folder or move them"
            )

    def _keep_errors(self, told: RunFolder) -> None:
        for left in told.errors.glob("*"):
            self.errors.mkdir(exist_ok=True)
            with writing(self.errors / left.name) as part:
                part.write_bytes(left.read_bytes())

    def _leave(self, mark: os.stat_result) -> None:
        with contextlib.suppress(OSError, ConfigError):
            self.check(mark)  # else these are another run's
            self._remove_parts()

    def _remove_parts(self) -> None:
        for folder in (self.path, self.errors, *self.checkpoints.glob("*")):
            remove_parts(folder)


def step_of(checkpoint: Path) -> int:
    """Number of steps in a checkpoint, by the name of its folder; -1 for another folder."""
    number = checkpoint.name.removeprefix("step_")
    return int(number) if number.isdecimal() else -1
