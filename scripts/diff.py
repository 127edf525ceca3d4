"""``penstock diff``: the first step and layers at which two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..compression.errors import ConfigError
from ..stages.files import refusing
from .command_line import find_own_modules

if TYPE_CHECKING:
    from ..pipeline.run.digests import Difference

HELP = """\
penstock diff RUN RUN [replay=true]

RUN                       the folder of a run that was trained with digest.every=
replay=true               repeat both runs from their checkpoints up to that step, as penstock replay does:
                          finds the first step where not every step is on record, and in it the first layer
                          whose output or gradient differs; draws RUN/replay/diff_step_N.png

Says the first step on record whose digests differ, what differs in it (the loss, gradients, optimizer
state, weights) and in which layers, then the options and versions in which the runs differ. The exit
code is 0 where all steps that both have are the same, else 1."""


def main(arguments: Sequence[str]) -> int:
    """Compare the two runs that ``arguments`` name; return the exit code."""
    again = "replay=true" in arguments
    arguments = [word for word in arguments if word != "replay=true"]
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
    if difference and again:
        _replay(one, other, difference)
    elif difference and not difference.follows:
        print("  add replay=true to find the first step that differs, or train with digest.every=1")
    return int(difference is not None)


def _replay(one: Path, other: Path, known: Difference) -> None:
    """Print where replays of both runs part, and draw how far they do in this step and those after it."""
    from ..pipeline.run import console
    from ..pipeline.run.layer_tensors import differences, draw_differences, paired, where_they_part
    from ..pipeline.run.replay import compared

    find_own_modules()
    by_step: dict[int, dict[str, list[float]]] = {}
    first: Difference | None = None
    for difference, ours, theirs in compared(one, other, known, tell=console.warn):
        pairs = paired(ours, theirs)
        if first is None:
            assert difference is not None, "it begins with one"
            first = difference
            if first.step != known.step:
                print(f"replayed: {first}")
            if pairs is None:
                lacks = "as one run has some, or micro-batches, that the other lacks"
                print(f"  replayed: layers are not compared, {lacks}")
                return
            part = where_they_part(pairs)
            same = "the outputs of all layers and their gradients are the same"
            print(f"  replayed: {' '.join(map(str, part)) if part else same}")
        if not pairs:
            break  # a step with other micro-batches
        by_step[first.step + len(by_step)] = differences(pairs)
    if first is None:
        print("  replays of both are the same: a run computed otherwise, or its code or data were others")
        return
    path = one / "replay" / f"diff_step_{first.step}.png"
    with refusing(path.parent):
        path.parent.mkdir(exist_ok=True)
    draw_differences(by_step, path, title=f"{one} and {other} from step {first.step} on")
    print(f"  {console.short(path)}")
