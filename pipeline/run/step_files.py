"""What a run leaves of its steps: pictures for a person, a trace to zoom into, tables for a program."""

from __future__ import annotations

from collections.abc import Sequence

from ...stages.files import save_json
from ..schedules.simulate import simulate_spans
from ..schedules.span import Span
from .perfetto import trace
from .run_folder import RunFolder
from .schedule_comparison import Comparison
from .timeline import Panel, draw

MEASURED = "measured"
SIMULATED = "simulated: every instruction in the measured median of its stage and kind, no time on the links"


def save_step(folder: RunFolder, spans: Sequence[Span], *, title: str) -> None:
    """Write ``timeline.png`` and ``timeline.json``.

    The upper panel says what the schedule alone makes of the step; what the lower one takes longer was lost
    on the links, or to instructions that took longer than usual.
    """
    panels = [
        Panel(title=SIMULATED, spans=simulate_spans(spans).spans),
        Panel(title=MEASURED, spans=spans),
    ]
    draw(panels, folder.timeline, title=title)
    save_json(folder.trace, trace(spans, title=title))


def save_comparison(folder: RunFolder, found: Comparison, *, title: str) -> None:
    """Write ``schedules.json`` and ``schedules.png``: a simulated step of every schedule on the same axis."""
    save_json(folder.schedules, found.facts())
    draw(found.panels(), folder.schedules_picture, title=title)
