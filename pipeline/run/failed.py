"""What a person sees of a failed run beside its one sentence: where the traceback lies, or all of it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from ...compression.errors import PenstockError
from ...conf.schema import TrainConfig
from ..ranks.failure import leave


@contextlib.contextmanager
def traced(config: TrainConfig, errors: Path | None = None) -> Iterator[None]:
    """Leave the traceback of what fails inside in the folder ``errors``; None: ranks did, and the notes of
    the error have it. With ``traceback=true`` print it."""
    try:
        yield
    except PenstockError as error:
        trace = getattr(error, "__notes__", [])
        if errors:
            left = leave(errors, error)
            trace = left.trace
            if not left.consequence:
                error.args = (left.sentence,)
        if config.traceback:
            print(*trace, sep="\n", file=sys.stderr)
        raise
