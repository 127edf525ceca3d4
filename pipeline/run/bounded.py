"""A process under a budget: what it frees goes back to the system, and it never has the whole model.

    the run      makes the model without memory for its parameters, and counts their bytes
    a child      makes it whole, writes every tensor to a file of the run folder, and ends
    every rank   makes it without memory, and reads from the file what its stages hold

A model that cannot be recorded by its shapes, or is not the same without values, is made whole by every
process, with a warning."""

import contextlib
import ctypes
import dataclasses
import json
import sys
from pathlib import Path

from torch import nn

from ...compression.errors import ConfigError, PenstockError
from ...compression.names import AUTO
from ...conf.schema import PlanConfig
from ...stages.files import refusing
from ...stages.safetensors_io import write_tensors
from ...stages.tracing.object_snapshot import digest
from ..data.samples import Description, Samples
from ..distributed.launcher import private_folder, run_rank, start_ranks
from . import build, console, planning
from .run_folder import RunFolder

LEAST_BYTES = 64 << 20  # parameters of fewer bytes are no reason to start a process
MMAP_THRESHOLD, LARGE = -3, 128 << 10  # M_MMAP_THRESHOLD of mallopt(3), and its value


def return_freed_memory(config: PlanConfig) -> None:
    """Have the C library give back every large block that is freed, where something is to leave memory: glibc
    else keeps blocks of up to 32 MiB between others. Other libraries have no such setting."""
    memory = config.memory
    if memory.device is not None or not {memory.tier, memory.weights, memory.parameters} <= {"device", AUTO}:
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, LARGE)


def first_values(folder: RunFolder) -> Path | None:
    """Return the file with the first values of the model, where the run has one."""
    return folder.first_values if folder.first_values.exists() else None


def is_without_memory(config: PlanConfig, folder: RunFolder) -> bool:
    """Return whether processes make the model without memory for its parameters."""
    return build.is_bare(config.model) or first_values(folder) is not None


def make_model(config: PlanConfig, samples: Samples, folder: RunFolder) -> nn.Module:
    """Return the model of a process of the run in ``folder``; errors are those of ``build.model``."""
    bare = is_without_memory(config, folder)
    return build.model(config.model, describe=samples.describe, seed=config.seed, bare=bare)


def recorded_without_memory(config: PlanConfig, samples: Samples) -> planning.Recorded | None:
    """Return the trace of the large model of a run with a budget, made without memory for its parameters;
    None, with a warning, where it cannot be."""
    memory = config.memory
    if build.is_bare(config.model) or (memory.device is None and memory.parameters != "disk"):
        return None
    try:
        model = build.model(config.model, describe=samples.describe, seed=config.seed, bare=True)
        if sum(parameter.nbytes for parameter in model.parameters()) < LEAST_BYTES:
            return None
        autocast = build.autocast(getattr(config, "autocast", None))
        return planning.record(config, samples, model=model, autocast=autocast)
    except ConfigError:  # of the options, so whoever makes the whole model refuses them
        return None
    except Exception as error:  # the model's own code may raise anything where values are missing
        _warn(str(error))
        return None


def write_first_values(config: PlanConfig, samples: Samples, folder: RunFolder) -> planning.Recorded | None:
    """Have a child write the values of a model that no process is to have whole; return its trace."""
    if (recorded := recorded_without_memory(config, samples)) is None:
        return None
    facts = {"model": config.model, "seed": config.seed, "describe": dataclasses.asdict(samples.describe)}
    with refusing("a temporary folder (TMPDIR)"), private_folder() as private:
        (private / "facts").write_text(json.dumps(facts))
        try:
            arguments = [str(private), str(folder.path)]
            start_ranks(__name__, arguments, errors=private, stages_of_rank=[[0]])
        except PenstockError as error:
            raise ConfigError(
                f"a process of its own makes the model once as a whole, and failed: {error}; give the model "
                "its values by model.load_weights= or model.init_weights="
            ) from error
        whole = (private / "digest").read_text()
    if whole == digest(recorded.model):
        return recorded
    folder.first_values.unlink()
    _warn("the model holds something else where it is made without values")
    return None


def _write(private: Path, folder: RunFolder) -> None:
    """In the child: make the model, write its tensors, and what else it holds as a digest."""
    facts = json.loads((private / "facts").read_text())
    describe = facts["describe"] | {"input_shape": tuple(facts["describe"]["input_shape"])}
    model = build.model(facts["model"], describe=Description(**describe), seed=facts["seed"])
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    write_tensors(folder.first_values, {name: tensor.detach() for name, tensor in tensors.items()})
    (private / "digest").write_text(digest(model))


def _warn(why: str) -> None:
    console.warn(
        "every process of this run makes the whole model first, which the budget does not count, as it "
        f"cannot be recorded without values: {why}"
    )


if __name__ == "__main__":
    private, run = (Path(path) for path in sys.argv[1:])
    run_rank(lambda: _write(private, RunFolder(path=run)), private)
