"""Slow storage as the simulator has it: bytes a second for all who read, and a latency."""

from __future__ import annotations

from math import inf

from ....compression.errors import ConfigError


class TokenBucket:
    """Grants ``rate`` bytes a second, in the order of asking; what nobody asks for adds up to ``burst``.

    A read ends ``latency`` seconds behind its grant; latencies of several readers pass at once."""

    def __init__(self, rate: float = inf, *, latency: float = 0.0, burst: float = 0.0) -> None:
        if not rate > 0 or latency < 0 or burst < 0:
            found = f"rate={rate} latency={latency} burst={burst}"
            raise ConfigError(
                f"storage needs a rate above 0, a latency and a burst of 0 or more, found {found}"
            )
        self.rate, self.latency, self.burst = rate, latency, burst
        self._granted = -inf  # until when the tokens are given away, if none add up

    def read(self, num_bytes: int, now: float) -> float:
        """When a read that is asked for ``now`` ends; calls come in the order of time."""
        if self.rate == inf:
            return now + self.latency
        self._granted = max(self._granted, now - self.burst / self.rate) + num_bytes / self.rate
        return max(now, self._granted) + self.latency
