"""A plan and the report of a step, made up."""

from profiles import layer_of, profile_of

from penstock import Report, partition
from penstock.pipeline.runtime.report import StageReport

PLAN = partition(profile_of([layer_of(name, size=4) for name in "abc"]), cuts=["b"], micro_batches=2)


def report(step: int = 0, *, loss: float = 1.5, seconds: float = 0.5) -> Report:
    first = StageReport(
        rank=0, forward_raw=100, forward_sent=40, compute_seconds=0.4, waiting_seconds=0.05,
        live_micro_batches=2, live_versions=3, versions_bytes=2048, peak_bytes=5120, resident_bytes=9 * 1024,
    )  # fmt: skip
    last = StageReport(
        rank=1, backward_raw=80, backward_sent=60, compute_seconds=0.2, waiting_seconds=0.25,
        live_micro_batches=1, live_versions=1, peak_bytes=3072, resident_bytes=8 * 1024,
    )  # fmt: skip
    return Report(step=step, loss=loss, seconds=seconds, num_samples=8, stages=(first, last))
