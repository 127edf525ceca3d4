"""``penstock diff``: the first step and layers at which two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..compression.errors import ConfigError
from .command_line import asks_for_help

HELP = """\
penstock diff RUN RUN

RUN                       the folder of a run that was trained with digest.every=

Says the first step on record whose digests differ, what differs in it (the loss, gradients, optimizer
state, weights) and in which layers, then the options and versions in which the runs differ. The exit
code is 0 where all steps that both have are the same, else 1."""


def main(arguments: Sequence[str]) -> int:
    """Compare the two runs that ``arguments`` name; return the exit code."""
    if asks_for_help(arguments):
        print(HELP)
        return 0
    for word in arguments:
        if word.startswith("-") or not Path(word).is_dir():
            raise ConfigError(f"{word} is no folder of a run; write penstock diff RUN RUN")
    if len(arguments) != 2:
        raise ConfigError(f"penstock diff compares two runs, found {len(arguments)}; write both")
    from ..pipeline.run.digests import first_difference, options_that_differ

    one, other = map(Path, arguments)
    difference, number = first_difference(one, other)
    print(difference or f"the same digests in all {number} steps that both have on record")
    for option, effect in options_that_differ(one, other):
        print(f"  {option}: {effect}")
    return int(difference is not None)
