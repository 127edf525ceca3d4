"""``penstock export``: the plain model's weights out of a checkpoint, whether or not its run ever ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..compression.errors import ConfigError
from ..pipeline.run import console
from .command_line import asks_for_help

OUTPUT = "output="
HELP = """\
penstock export RUN|CHECKPOINT [output=FILE]

RUN|CHECKPOINT            the folder of a run, whose newest whole checkpoint counts, or of one checkpoint
output=FILE               the safetensors file to write; default: model_step_STEPS.safetensors in this folder

The file has what model.safetensors of a finished run has: it loads strictly into the plain model. No more
than one tensor is in memory at a time."""


def main(arguments: Sequence[str]) -> int:
    """Export as ``arguments`` say; return the exit code.

    Raises: ConfigError: an argument does not fit, there is no checkpoint, or the file is there already.
            CheckpointError: all checkpoints are damaged."""
    if asks_for_help(arguments):
        print(HELP)
        return 0
    source, output = _read(arguments)
    if output:
        _refuse_existing(output)
    from ..pipeline.run.checkpoints import export

    def target(step: int) -> Path:
        path = output or Path(f"model_step_{step}.safetensors")
        _refuse_existing(path)
        return path

    checkpoint, path = export(source, target, console.warn)
    print(f"{console.short(path)}: the model behind step {checkpoint.step}, from {checkpoint.folder}")
    return 0


def _read(arguments: Sequence[str]) -> tuple[Path, Path | None]:
    outputs = [word.removeprefix(OUTPUT) for word in arguments if word.startswith(OUTPUT)]
    sources = [word for word in arguments if not word.startswith(OUTPUT)]
    usual = "write penstock export RUN output=FILE"
    for word in sources:
        if word.startswith("-") or ("=" in word and not Path(word).exists()):
            raise ConfigError(f"penstock export has no option {word}; {usual}")
    if len(sources) != 1:
        found = " ".join(sources) or "none"
        raise ConfigError(f"penstock export reads one run or checkpoint, found {found}; {usual}")
    if outputs and not outputs[-1]:
        raise ConfigError(f"output= names no file; {usual}")
    return Path(sources[0]), Path(outputs[-1]) if outputs else None


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{path} is there already and is not written over; name another {OUTPUT}FILE")
