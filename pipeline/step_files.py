"""What a run leaves of its last step: a picture for a person, and a trace to zoom into."""

from __future__ import annotations

from collections.abc import Sequence

from .perfetto import trace
from .run_folder import RunFolder, save_json, writing
from .simulate import simulate_spans
from .timeline import Panel, Span, draw

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
    with writing(folder.timeline):
        draw(panels, folder.timeline, title=title)
    save_json(folder.trace, trace(spans, title=title))
