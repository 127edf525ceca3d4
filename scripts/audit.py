"""``penstock audit``: steps of a run once more, drawn at random, to find a machine that computes wrongly."""

from collections.abc import Sequence
from typing import Any

from ..compression.errors import ConfigError
from .replay import run_and_options

HELP = """\
penstock audit RUN [steps=N] [step=N] [oldest=N] [seed=N]

RUN                       the folder of a run that was trained with digest.every=
steps=N                   how many steps on record to repeat; default: 20
step=N                    repeat this one and no other
oldest=N                  refuse to begin at a checkpoint of an earlier step
seed=N                    of what is drawn: the steps, and for each another cut, schedule and tier (but for
                          runs with lossy codecs or clip.scope=stage, whose bits depend on it); default: 0

Each step is repeated in this process from the newest checkpoint at or before it, or from the beginning
(checkpoint.keep= keeps more of them), and compared with what is on record. The exit code is 0 where all are
the same, else 1. A step that differs is repeated a second time: if that has the same other bits, the run
computed otherwise, and the ranks and hosts are named that computed the gradient, update or layer
(digest.layers=true) which differs first (world.jsonl); else this machine does not repeat itself."""

REPEATS = (
    "a second replay has the same bits: the run computed otherwise, or its code, data or versions were others"
)
PARTS = "a second replay has other bits: this machine does not repeat itself"


def main(arguments: Sequence[str]) -> int:
    """Audit the run that ``arguments`` name; return the exit code."""
    run, options = run_and_options(arguments, "penstock audit RUN")
    numbers: dict[str, Any] = {"steps": 20, "seed": 0, "step": None, "oldest": 0}
    for key, value in options.items():
        if key not in numbers or not value.isdecimal() or (key == "steps" and value == "0"):
            raise ConfigError(
                f"{key}={value}: penstock audit takes steps=, step=, oldest= and seed=, numbers; try steps=20"
            )
        numbers[key] = int(value)
    from ..pipeline.run import console
    from ..pipeline.run.digests import computed_by
    from ..pipeline.run.replay import audited

    wrong = 0
    for audit in audited(run, tell=console.warn, **numbers):
        how = " ".join(audit.options) or "the same cut"
        print(f"step {audit.step} ({how}): {audit.difference or 'as on record'}")
        if audit.difference:
            wrong += 1
            print(f"  {REPEATS if audit.repeats else PARTS}")
            if audit.repeats and (who := computed_by(run, audit.difference)):
                print(f"  {who}")
    return int(wrong > 0)
