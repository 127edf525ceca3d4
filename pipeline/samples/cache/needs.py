"""How many samples of a batch a job wants cached, and how many it is due.

Source: CN114968588A, steps S13, S21 and S22."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from .policy import Job


def desired(job: Job) -> int:
    """E_i of step S22: the fewest cached samples of a batch with which reading hides behind the rest.

    Reading takes T_io - h t_s where h samples are cached, and H of it is hidden: the least h with nothing
    left, clamp(ceil((T_io - H) / t_s), 0, B_i). The formula is not legible in the source; this is what
    follows from its text. A job without times may have a whole batch."""
    times, batch = job.times, job.batch_size
    if times is None:
        return batch
    shown = times.batch_io - times.hidden
    if shown <= 0:
        return 0
    # 1e-9: (0.3 - 0.2) / 0.1 is a little above 1, and means 1
    return batch if shown >= batch * times.sample_io else min(batch, ceil(shown / times.sample_io - 1e-9))


def due(job: Job, num_slots: float) -> float:
    """s_i of step S21: the samples of a batch that hit when ``num_slots`` (M_i) are the job's alone."""
    return min(num_slots / max(1, job.num_samples), 1.0) * job.batch_size


def by_epoch(jobs: Sequence[Job]) -> list[Job]:
    """Step S13: the jobs whose times are known, ascending by T_i."""
    return sorted((job for job in jobs if job.times is not None), key=lambda job: (_epoch(job), job.name))


def gains(listed: Sequence[Job], *, last_gain: int | None = None) -> dict[str, int]:
    """k_i of step S13, by name: the slots that a request for one is given, more the shorter an epoch.

    Args: listed: as ``by_epoch`` returns it.
          last_gain: of the slowest job, where it has a neighbour to ask."""
    found = {
        job.name: max(1, round(_epoch(listed[-1]) / _epoch(job))) if _epoch(job) > 0 else 1 for job in listed
    }
    if last_gain is not None and len(listed) > 1:
        found[listed[-1].name] = last_gain
    return found


def _epoch(job: Job) -> float:
    assert job.times is not None
    return job.times.epoch
