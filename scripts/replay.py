"""``penstock replay``: a step of a run once more, and what is in it."""

from __future__ import annotations

import bdb
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..compression.errors import ConfigError, StageError
from .command_line import find_own_modules

if TYPE_CHECKING:
    from ..pipeline.run.replay import RepeatedStep

NOT_FINITE = "nan"
HELP = """\
penstock replay RUN step=N [show=NAME] [break=NAME] [KEY=VALUE ...]

RUN                       the folder of a run of penstock train
step=N                    the step to repeat, as metrics.jsonl counts them; nan: the first whose loss is no
                          number, with the layer in which it came up
show=NAME                 print figures of what the layer or module of this name returned for each
                          micro-batch, of its gradient, and of the weights, gradients and optimizer state
                          after the step; write them to RUN/replay/step_N.safetensors, drawn to step_N.png
break=NAME                open a debugger (pdb) in the step before the layer or module of this name
KEY=VALUE                 options of penstock train, such as stages=3 schedule=gpipe; default: one stage, or
                          the stages of the run where its bits depend on them

The replay runs in this process, from the newest checkpoint at or before the step, or from the beginning.
It is compared with the digests of each step on record (digest.every=), else with its loss. The exit code is
0 where they are the same, else 1; also 1 where q or the end of the input leaves the debugger."""


def main(arguments: Sequence[str]) -> int:
    """Repeat the step that ``arguments`` name; return the exit code."""
    run, options = run_and_options(arguments, "penstock replay RUN step=N")
    step, name, stop = (options.pop(key, None) for key in ("step", "show", "break"))
    if step is None or not (step.isdecimal() or step == NOT_FINITE):
        raise ConfigError(f"step= is a number of a step, or nan, found {step}; write step=0 for the first")
    if step == NOT_FINITE and (name or stop):
        raise ConfigError(
            "show= and break= look at a whole step, and step=nan ends at the NaN; give its number"
        )
    from ..pipeline.run import console
    from ..pipeline.run.replay import first_not_finite, replayed, show

    if step == NOT_FINITE:
        options["detect_anomaly"] = "true"
    number = first_not_finite(run) if step == NOT_FINITE else int(step)
    typed = [f"{key}={value}" for key, value in options.items()]
    compared, repeated = 0, None
    try:
        steps = replayed(run, number, typed, tell=console.warn, show=name, stop=stop)
        with contextlib.closing(steps):
            for repeated in steps:
                compared += bool(repeated.on_record["values"])
                if repeated.step == number or (repeated.difference and not stop):
                    break
            assert repeated is not None, "there is a step"
            print(repeated.difference or _sentence(repeated, compared))
            if name:
                show(repeated, name, run / "replay" / f"step_{repeated.step}.safetensors")
    except StageError as error:
        if _was_left(error):
            print("the debugger was left, so the step was not repeated to its end")
            return 1
        if step != NOT_FINITE or "detect_anomaly" not in str(error):
            raise
        print(error)
        return 0
    if step == NOT_FINITE:
        print("every value was finite this time: the run computed otherwise, or its code or data were others")
    return int(repeated.difference is not None or step == NOT_FINITE)


def _was_left(error: BaseException | None) -> bool:
    """Return whether an error comes of q in the debugger."""
    return error is not None and (isinstance(error, bdb.BdbQuit) or _was_left(error.__cause__))


def _sentence(repeated: RepeatedStep, compared: int) -> str:
    loss = repeated.line["loss"] and float.fromhex(repeated.line["loss"])
    has_digests = bool(repeated.on_record["values"])
    told = "digests as on record" if has_digests else "loss as on record, which has no digests of this step"
    more = f"; {before} compared before it, the same" if (before := compared - has_digests) else ""
    return f"step {repeated.step}: loss {loss}; the same {told}{more}"


def run_and_options(arguments: Sequence[str], usual: str) -> tuple[Path, dict[str, str]]:
    """Return the folder of a run and KEY=VALUE options."""
    folders = [word for word in arguments if "=" not in word or Path(word).is_dir()]
    if len(folders) != 1 or folders[0].startswith("-") or not Path(folders[0]).is_dir():
        found = f"{' '.join(folders)} is no folder of a run" if folders else "no folder of a run was named"
        raise ConfigError(f"{found}; write {usual}")
    find_own_modules()
    pairs = (word.partition("=") for word in arguments if word not in folders)
    return Path(folders[0]), {key: value for key, _, value in pairs}
