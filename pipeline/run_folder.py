"""The run folder: what a run was asked, what it planned, and what came of it.

Files that other programs read (JSON, YAML, safetensors), each with one name. ``summary.json`` comes last: it
tells a finished run from an interrupted one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from .. import __version__
from ..compression.errors import ConfigError
from ..conf.schema import PlanConfig, TrainConfig

if TYPE_CHECKING:
    from torch import Tensor

    from ..stages.plan import Plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """Where one run keeps its files."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def plan(self) -> Path:
        """The plan that ran."""
        return self.path / "plan.json"

    @property
    def plan_picture(self) -> Path:
        """The plan, drawn."""
        return self.path / "plan.png"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        """What the closing table shows."""
        return self.path / "summary.json"

    @property
    def results(self) -> Path:
        """What a bench measured, in the place of a summary."""
        return self.path / "results.json"

    @property
    def timeline(self) -> Path:
        """The last step, drawn."""
        return self.path / "timeline.png"

    @property
    def trace(self) -> Path:
        """The last step, for ui.perfetto.dev."""
        return self.path / "timeline.json"

    @property
    def schedules(self) -> Path:
        """How the schedules compare; ``schedules_picture`` shows their timelines."""
        return self.path / "schedules.json"

    @property
    def schedules_picture(self) -> Path:
        """The simulated step of every schedule, drawn."""
        return self.path / "schedules.png"

    @property
    def model(self) -> Path:
        """The trained weights under the plain model's names."""
        return self.path / "model.safetensors"

    @property
    def errors(self) -> Path:
        """What failing ranks left; there only if some did."""
        return self.path / "errors"

    def claim(self) -> None:
        """Make the folder, or take over an unfinished run's.

        Raises: ConfigError: it holds a finished run, or cannot be written.
        """
        if self.summary.exists() or self.results.exists():
            raise ConfigError(
                f"hydra.run.dir={self.path} already holds a finished run; choose another folder or remove it"
            )
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".probe"
            probe.touch()
            probe.unlink()
        for failure in self.errors.glob("*"):
            failure.unlink()

    def save(self, config: PlanConfig, plan: Plan) -> None:
        """Write the resolved configuration, with the versions that ran it, and the plan with its picture."""
        import torch

        content = dataclasses.asdict(config)
        content["versions"] = {
            "penstock": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }
        with writing(self.path):
            OmegaConf.save(content, self.config)
            plan.save(self.plan)
            plan.draw(self.plan_picture)

    def read_config(self) -> TrainConfig:
        """Return the configuration that ``save`` wrote."""
        content = OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.load(self.config))
        config = OmegaConf.to_object(content)
        assert isinstance(config, TrainConfig)
        return config

    def read_summary(self) -> dict[str, Any]:
        """Return what rank 0 left of a finished run."""
        return json.loads(self.summary.read_text())

    def release(self) -> None:
        """Remove the folder again if nothing was written into it."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


def save_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON whole or not at all."""
    part = path.with_suffix(".part")
    with writing(path):
        part.write_text(f"{json.dumps(content, indent=2, allow_nan=False)}\n")
        part.replace(path)


def save_model(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a state dict as safetensors; a tied tensor stands under each of its names."""
    from safetensors.torch import save_file

    seen: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        plain = tensor.detach().contiguous()
        apart[name] = plain.clone() if storage in seen else plain  # the format knows no sharing
        seen.add(storage)
    with writing(path):
        save_file(apart, path)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into one sentence.

    Raises: ConfigError: no space, no permission, no such place.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror or error}); choose another folder with hydra.run.dir="
        ) from error
