"""A short run of the fuzz, and proof that it would find something."""

from __future__ import annotations

from random import Random

import pytest
from fuzz_frames import fuzz, seeds
from mutations import mutated

from penstock.compression.geometry import Words
from penstock.compression.names import CODEC_NAMES
from penstock.compression.narrow import Narrow


def test_a_short_run_finds_nothing() -> None:
    report = fuzz(seconds=2, seed=0)
    assert not report.findings, report.findings
    assert report.executions > 100
    assert report.num_arcs > 300
    assert set(report.codecs) <= set(CODEC_NAMES)


def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = Narrow.unpack

    def forgetful(codec: Narrow, payload: int, num_bytes: int, out: Words) -> None:
        unpack(codec, payload, num_bytes, out)
        raise IndexError(out.num_words)

    monkeypatch.setattr(Narrow, "unpack", forgetful)
    report = fuzz(seconds=1, seed=0)
    assert any(what.startswith("IndexError in test_fuzz.py") for what in report.findings)


def test_the_same_seed_makes_the_same_frames() -> None:
    corpus = seeds()
    assert corpus == seeds()
    runs = [
        [mutated(rng, rng.choice(corpus), corpus[0]) for _ in range(200)] for rng in (Random(3), Random(3))
    ]
    assert runs[0] == runs[1]
