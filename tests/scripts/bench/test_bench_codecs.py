"""The bench of codecs: bounds that bound, tensors that are what they are called, checks that check."""

from __future__ import annotations

import io
from collections import Counter
from itertools import chain
from math import inf, log2

import numpy as np
import pytest
import torch
from rich.console import Console

from penstock.compression.codec import CODECS, decode, encode
from penstock.compression.frame import header_bytes
from penstock.compression.geometry import Words
from penstock.compression.kernels import jit
from penstock.compression.raw import Raw
from penstock.conf.bench_codecs import BenchCodecsConfig
from penstock.pipeline.run import build
from penstock.pipeline.run.epochs import loss
from penstock.scripts.bench import codecs_bench, codecs_sides, codecs_subjects
from penstock.scripts.bench.codecs_bench import bench_codecs, call_overhead, call_table, shown
from penstock.scripts.bench.codecs_bounds import bound, entropy, words_of
from penstock.scripts.bench.codecs_peers import PEERS, missing, peers
from penstock.scripts.bench.codecs_subjects import Subject, captured, subjects, trained

pytestmark = pytest.mark.slow  # what it tests is a tool of maintainers

SGD = {"_target_": "torch.optim.SGD", "lr": 0.1}


def job(**options) -> BenchCodecsConfig:
    quick = {"optimizer": SGD, "repeats": 1, "capture_steps": 2, "sizes": ["16KiB"]}
    return BenchCodecsConfig(**quick | options)


def zeros_and_numbers(density: float, dtype: torch.dtype = torch.float32, num: int = 20000) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    tensor = torch.randn(num, generator=source)
    return tensor.masked_fill_(torch.rand(num, generator=source) >= density, 0).to(dtype)


def ratio(codec: str, tensor: torch.Tensor) -> float:
    return tensor.nbytes / (encode(tensor, codec).numel() - header_bytes(tensor.dim()))


def test_entropy_is_that_of_the_counts():
    symbols = np.random.default_rng(0).binomial(20, 0.3, 3000).astype(np.uint8)
    shares = [count / 3000 for count in Counter(symbols.tolist()).values()]
    assert entropy(symbols) == pytest.approx(-sum(share * log2(share) for share in shares))
    assert entropy(np.zeros(9, np.uint8)) == 0
    assert entropy(np.arange(256, dtype=np.uint8)) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("density", [0.1, 0.5, 0.9])
def test_zero_value_reaches_its_bound_and_no_format_passes_its_own(density, dtype):
    tensor = zeros_and_numbers(density, dtype)
    words = words_of(tensor)
    best = {codec: bound(codec, words, dtype) for codec in CODECS}
    assert ratio("zero_value", tensor) == pytest.approx(best["zero_value"])
    for codec in ("raw", "exponent", "zero_value+exponent"):
        assert ratio(codec, tensor) <= best[codec] * (1 + 1e-9)
    assert best["zero_value"] < best["zero_value+exponent"]


def test_bounds_of_what_can_be_counted_by_hand():
    alike = np.full(4096, 0x3F800000, np.uint32)  # 1.0: one exponent, so it costs nothing
    assert bound("exponent", alike, torch.float32) == pytest.approx(32 / 24)
    signs = alike | np.arange(4096, dtype=np.uint32) << 31  # of 1.0 and -1.0
    assert bound("exponent", signs, torch.float32) == pytest.approx(32 / 24)
    assert bound("byte_plane", signs, torch.float32) == pytest.approx(32)
    assert bound("byte_plane", alike, torch.float32) == inf
    assert bound("narrow", np.arange(16, dtype=np.uint64), torch.int64) == 16
    assert bound("narrow", np.array([2**64 - 8, 7], np.uint64), torch.int64) == 16  # from -8 to 7
    assert bound("raw", alike, torch.float32) == 1
    half = np.arange(4096) % 2 == 0
    assert bound("zero_value", alike, torch.float32, half) == 2
    # Where the bitmap costs more than it saves, the second codec alone is the best of a combination.
    assert bound("zero_value+exponent", alike, torch.float32) == pytest.approx(32 / 24)


@pytest.mark.parametrize("isa", [None, *jit.host_isas()])
def test_every_codec_runs_on_every_instruction_set(isa):
    mask = encode(zeros_and_numbers(0.5))
    dense = torch.randn(20000, generator=torch.Generator().manual_seed(1))
    named = codecs_sides.codecs_of(isa)
    assert named.keys() == CODECS.keys()
    tensors = [zeros_and_numbers(0.5), torch.arange(9000), torch.arange(9000) % 3 == 0]
    for subject in [*(Subject("", tensor) for tensor in tensors), Subject("", dense, mask)]:
        bench = codecs_sides.Bench(subject, named, public=isa is None)
        for name in CODECS:
            if codecs_sides.applies(name, subject):
                side = bench.ours(name)
                assert side.facts["ratio"] == subject.tensor.nbytes / (
                    encode(subject.tensor, name, mask=subject.mask).numel() - 64
                )
                assert {"pack", "unpack"} <= side.routes.keys()
                for route in side.routes.values():
                    route()


class Careless(Raw):
    """Loses what it unpacks."""

    def unpack(self, payload: int, num_bytes: int, out: Words) -> None:
        super().unpack(payload, num_bytes - 1, out)


def test_a_codec_that_changes_a_bit_is_not_timed():
    subject = Subject("", torch.randn(100))
    broken = dict(CODECS) | {"raw": Careless()}
    with pytest.raises(AssertionError, match="raw changed a bit"):
        codecs_sides.Bench(subject, broken, public=False).ours("raw")
    dull = peers(["lz4"])[0]._replace(unpack=lambda packed, num_bytes: b"")
    with pytest.raises(AssertionError, match="lz4 changed a bit"):
        codecs_sides.Bench(subject, CODECS, public=False).theirs(dull)


def test_a_captured_gradient_is_that_of_the_plain_loop():
    samples = build.samples({"_target_": "penstock.pipeline.samples.digits.load", "size": 8})
    model = {"_target_": "penstock.pipeline.models.mlp", "hidden": [32]}
    kept = trained(job(), samples, model, ["2"], 16)
    network = build.model(model, describe=samples.describe, seed=0)
    optimizer, outputs = torch.optim.SGD(network.parameters(), lr=0.1), {}

    def listen(layer, inputs, output):
        output.retain_grad()
        outputs["last"] = output

    network.get_submodule("2").register_forward_hook(listen)
    batches = samples.batches("train", batch_size=16, seed=0)
    for _ in range(2):
        optimizer.zero_grad()
        inputs, targets = next(batches)
        loss(network(inputs), targets).backward()
        optimizer.step()
    assert torch.equal(kept["2 activation"], outputs["last"])
    assert torch.equal(kept["2 gradient"], outputs["last"].grad)


def test_classes_hold_what_they_are_called():
    found = list(
        subjects(job(classes=["synthetic", "integers", "masks"], densities=[0.25], dtypes=["float16"]))
    )
    dtypes = {subject.kind: subject.tensor.dtype for subject in found}
    assert dtypes == {"synthetic": torch.float16, "integers": torch.int64, "masks": torch.bool}
    random = found[0].tensor
    assert random.nbytes == 16 << 10
    assert float((random != 0).float().mean()) == pytest.approx(0.25, abs=0.02)


def test_what_crosses_the_cuts_of_a_job_is_what_the_plain_loop_has():
    data = {"_target_": "penstock.pipeline.samples.digits.load", "size": 8}
    model = {"_target_": "penstock.pipeline.models.mlp", "hidden": [32]}
    options = {"cuts": ["_2"], "ranks": 1, "threads": 1, "batch_size": 16, "micro_batches": 1}
    config = job(model=model, data=data, deterministic=False, **options)
    kept, plain = captured(config), trained(config, build.samples(data), model, ["2"], 16)
    assert list(kept) == ["_2 activation", "_2 gradient"]
    assert all(torch.equal(kept[f"_{name}"], tensor) for name, tensor in plain.items())


def test_gradients_behind_a_relu_come_with_its_mask(monkeypatch):
    monkeypatch.setattr(codecs_subjects, "_ACTIVATIONS", ("relu", "gelu"))
    monkeypatch.setattr(codecs_subjects, "_BATCH", 2)
    found = list(subjects(job(classes=["text"], dtypes=["bfloat16"], capture_steps=1)))
    (masked,) = (subject for subject in found if subject.mask is not None)
    assert masked.name == "gpt relu blocks.1.activation gradient, mask reused"
    assert masked.mask is not None
    activation = decode(masked.mask)
    assert activation is not None
    assert torch.equal(activation, found[0].tensor)
    assert encode(masked.tensor, mask=masked.mask).numel() < masked.tensor.nbytes * 0.6


def test_rows_say_what_was_measured_and_fit_the_page():
    options = {"classes": ["synthetic", "masks"], "densities": [0.5, 1.0], "dtypes": ["float32"]}
    tensors = list(bench_codecs(job(**options)))
    names = [row["codec"] for row in tensors[0]]
    assert names == [
        name for name in (*CODECS, *PEERS) if name != "narrow" and (not missing() or "blosc" not in name)
    ]
    facts = {"copy", "clone", "pack", "unpack", "ratio", "bound", "sent_as", "density", "runs"}
    assert all(facts <= row.keys() for rows in tensors for row in rows)
    assert {"encode", "decode"} <= tensors[0][0].keys()
    printed = Console(file=io.StringIO(), width=110)
    for rows in tensors:
        printed.print(shown(rows))
    printed.print(call_table(call_overhead(job(codecs=["raw", "zero_value"]))))
    text = printed.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "…" not in text
    assert "zero_value+byte_plane → byte_plane" in text
    panels = [
        axes for axes in codecs_bench.figure({"rows": list(chain.from_iterable(tensors))}).axes if axes.axison
    ]
    assert [axes.get_title(loc="left") for axes in panels] == ["synthetic", "masks"]
    five = [dict(tensors[0][0], **{"class": kind}) for kind in "abcde"]
    assert [axes.axison for axes in codecs_bench.figure({"rows": five}).axes] == [True] * 5 + [False]
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in panels)


def test_a_choice_of_codecs_and_kernels_is_kept_to():
    options = {"classes": ["synthetic"], "densities": [0.5], "dtypes": ["float32"]}
    (rows,) = bench_codecs(job(codecs=["zero_value", "lz4"], isa="portable", **options))
    assert [(row["codec"], row["by"]) for row in rows] == [("zero_value", "penstock"), ("lz4", "others")]
    assert "encode" not in rows[0]
