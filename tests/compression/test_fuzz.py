"""Short runs of the fuzzes of frames and of promises, and proof that they would find something."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random

import pytest
from fuzz_frames import fuzz, seeds
from fuzz_promises import Promised, lawful, limited
from mutations import mutated

from penstock.compression.geometry import Words
from penstock.compression.names import CODEC_NAMES
from penstock.compression.narrow import Narrow
from penstock.compression.promise import Promise


@pytest.mark.parametrize("options", [{}, {"kind": Promised}], ids=["frames", "promises"])
def test_a_short_run_finds_nothing(options) -> None:
    assert lawful() > 200
    with limited() if options else nullcontext():
        report = fuzz(seconds=2, seed=0, **options)
    assert not report.findings, report.findings
    assert report.executions > 100
    assert report.num_arcs > 300
    assert report.decoded > 10
    assert set(report.codecs) <= set(CODEC_NAMES)


def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = Narrow.unpack

    def forgetful(codec: Narrow, payload: int, num_bytes: int, out: Words) -> None:
        unpack(codec, payload, num_bytes, out)
        raise IndexError(out.num_words)

    with monkeypatch.context() as patch:
        patch.setattr(Narrow, "unpack", forgetful)
        found = fuzz(seconds=1, seed=0).findings
    assert any(what.startswith("IndexError in test_fuzz.py") for what in found)
    monkeypatch.setattr(Promise, "hold", lambda promise, header: None)
    assert "not what was promised" in fuzz(seconds=1, seed=0, kind=Promised).findings


def test_the_same_seed_makes_the_same_frames() -> None:
    corpus = seeds()
    assert corpus == seeds()
    runs = [
        [mutated(rng, rng.choice(corpus), corpus[0]) for _ in range(200)] for rng in (Random(3), Random(3))
    ]
    assert runs[0] == runs[1]
