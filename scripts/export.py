"""``penstock export``: the plain model's weights out of a checkpoint, whether or not its run ever ended."""

from collections.abc import Sequence
from pathlib import Path

from ..compression.errors import ConfigError
from ..pipeline.run import console

OUTPUT = "output="
HELP = """\
penstock export RUN|CHECKPOINT [output=FILE]

RUN|CHECKPOINT            the folder of a run, whose newest whole checkpoint counts, or of one checkpoint
output=FILE               the safetensors file to write; default: model_step_STEPS.safetensors in this folder

The file has what model.safetensors of a finished run has: it loads strictly into the plain model. No more
than one tensor is in memory at a time."""


def main(arguments: Sequence[str]) -> int:
    """Export as ``arguments`` say; return the exit code."""
    outputs = [word.removeprefix(OUTPUT) for word in arguments if word.startswith(OUTPUT)]
    sources = [word for word in arguments if not word.startswith(OUTPUT)]
    usual = "write penstock export RUN output=FILE"
    for word in sources:
        if word.startswith("-") or ("=" in word and not Path(word).exists()):
            raise ConfigError(f"penstock export has no option {word}; {usual}")
    if len(sources) != 1:
        given = " ".join(sources) or "none"
        raise ConfigError(f"penstock export reads one run or checkpoint, found {given}; {usual}")
    if outputs and not outputs[-1]:
        raise ConfigError(f"output= names no file; {usual}")
    if outputs:
        _refuse_existing(Path(outputs[-1]))
    from ..pipeline.run.checkpoints import export

    def target(step: int) -> Path:
        path = Path(outputs[-1] if outputs else f"model_step_{step}.safetensors")
        _refuse_existing(path)
        return path

    checkpoint, path = export(Path(sources[0]), target, console.warn)
    print(f"{console.short(path)}: the model behind step {checkpoint.step}, from {checkpoint.folder}")
    return 0


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{path} is there already and is not written over; name another {OUTPUT}FILE")
