"""Speed and ratio of every codec on every class of tensors, next to a copy, lz4, zstd and blosc2.

Whatever is timed has been checked bit for bit. Ratios have a bound next to them: Shannon, A Mathematical
Theory of Communication (1948), for symbols taken one by one (order 0)."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import cycle, islice
from math import inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
import torch
import torch.nn.functional as F
from harness import Options, Results, alternate, medians, say, timed
from torch import Tensor

from penstock.compression.buffers import Pool
from penstock.compression.codec import CODECS, decode, encode
from penstock.compression.frame import header_bytes, read_header, sections
from penstock.compression.geometry import Words
from penstock.compression.kernels import jit
from penstock.compression.names import lossless
from penstock.compression.registry import codecs_on
from penstock.compression.zero_value import (
    bitmap_for,
    bitmap_in,
    has_bitmap,
    pack_masked,
    unpack_masked,
)
from penstock.conf.schema import TrainConfig
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.run import build
from penstock.pipeline.run.planning import decide
from penstock.pipeline.run.training_loop import loss
from penstock.pipeline.schedules.messages import Message
from penstock.stages.units import parse_bytes, show_bytes

Routes = dict[str, Callable[[], Any]]
PEERS = ("lz4", "zstd_1", "blosc2_shuffle", "blosc2_bitshuffle")
SPEEDS = {"pack": "copy", "unpack": "copy", "encode": "clone", "decode": "clone"}
SMALL_BYTES = (1 << 10, 16 << 10, 64 << 10)
BATCH_BYTES, CALLS, SECONDS = (
    2 << 20,
    50,
    0.4,
)  # a small tensor is timed many times; seconds for all runs of a side
CHUNK, EXPONENT_BITS = 1 << 20, 8
NETWORKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "resnet18": ({"model": "resnet18"}, ("relu", "layer1", "layer3")),
    "vgg11": ({"model": "torchvision", "model.name": "vgg11"}, ("features.1", "features.7", "features.14")),
} | {
    f"gpt {name}": (
        {"model": "gpt", "model.activation": name, "data": "text"},
        ("blocks.1.activation", "blocks.1"),
    )
    for name in ("gelu", "relu", "relu2")
}
"""Options of a job, and the modules whose outputs are taken."""

MASKED = ("resnet18", "vgg11", "gpt relu")
"""Networks whose first module ends in a ReLU, as all of an image network do: gradients are zero there."""

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


def options() -> Any:
    """Return the parser of the command line."""
    made = harness.parser(__doc__, job="data=digits ranks=2; for the class job", repeats=9)
    listed, name_of = harness.list_of, harness.name_of
    add = made.add_argument
    add("--classes", type=listed(name_of(tuple(CLASSES))), default=list(CLASSES)[:-1],
        help=f"classes of tensors: {', '.join(CLASSES)}; job: what crosses the cuts of the job")  # fmt: skip
    known = (*lossless(), *PEERS)
    add("--codecs", type=listed(name_of(known)), default=list(known), help="codecs, Penstock's and others'")
    size = harness.option(lambda text: parse_bytes(text, name="sizes"))
    add("--sizes", type=listed(size), default=[32 << 20], help="bytes of synthetic tensors, such as 32MiB")
    density = harness.between(-1e-9, 1)
    add("--densities", type=listed(density), default=[0.1, 0.5, 0.9, 1.0], help="share of non-zero elements")
    dtypes = ("float64", "float32", "float16", "bfloat16")
    add("--dtypes", type=listed(name_of(dtypes)), default=["float32", "bfloat16"], help="dtypes of floats")
    isas = "kernels: avx512, avx2 or portable; none: the machine's best, and encode and decode too"
    add("--isa", type=name_of(("avx512", "avx2", "portable")), help=isas)
    capture = "steps that a network trains before its tensors are taken"
    add("--capture-steps", type=harness.at_least(1), default=10, help=capture)
    return made


def bench(asked: Options, path: Path) -> Results:
    """Measure every codec on every class of tensors; results are printed and kept tensor by tensor."""
    config = harness.train_config(asked.job, {"threads": 1})
    torch.set_num_threads(config.threads or 1)
    codecs = CODECS if asked.isa is None else codecs_on(asked.isa)
    results = Results(path, threads=config.threads, isa=asked.isa or jit.host_isas()[0], rows=[], overhead=[])
    packages = {name: version(name) for name in ("lz4", "zstandard", "blosc2") if find_spec(name)}
    results.content["versions"] |= packages
    for kind in asked.classes:
        for subject in CLASSES[kind](asked, config):
            tensor = subject.tensor.detach().contiguous()
            rows = list(rows_of(subject._replace(tensor=tensor), kind, asked, codecs))
            results.keep(rows=rows)
            first = rows[0]
            facts = (
                f"{kind} {first['dtype']}, {show_bytes(first['num_bytes'])}, {first['density']:.1%} not zero"
            )
            harness.show(rows, COLUMNS, title=f"{first['tensor']}: {facts}")
    if asked.isa is None:
        results.keep(overhead=call_overhead(asked))
        harness.show(
            results.content["overhead"], CALL_COLUMNS, title="one call on a small tensor, microseconds"
        )
    say("pack and unpack as multiples of a copy to kept memory; encode and decode of tensor.clone()")
    if "blosc2" not in packages:
        say("rows of blosc2 are left out: it is not installed; pip install blosc2 adds them")
    return results


COLUMNS: dict[str, Any] = {
    "codec": lambda row: row["codec"] + ("" if row["sent_as"] == row["codec"] else f" -> {row['sent_as']}"),
    "ratio": "{ratio:.3f}",
    "bound": "{bound:.3f}",
    "of bound": lambda row: f"{row['ratio'] / row['bound']:.1%}",
    **{verb: lambda row, verb=verb, of=of: f"{row[of] / row[verb]:.2f}" for verb, of in SPEEDS.items()},
}
CALL_COLUMNS: dict[str, Any] = {"codec": "{codec}", "bytes": "{num_bytes}"} | {
    verb: lambda row, verb=verb: f"{1e6 * row[verb]:.1f}" for verb in ("encode", "decode", "clone")
}


# Tensors: random ones, and those of networks that have trained. Only real tensors say what a codec saves.


class Subject(NamedTuple):
    """A tensor, and the frame whose bitmap says where it matters, if there is one."""

    name: str
    tensor: Tensor
    mask: Tensor | None = None


def _synthetic(asked: Options, config: TrainConfig) -> Iterator[Subject]:
    source = torch.Generator().manual_seed(config.seed)
    for dtype in _dtypes(asked):
        for size in asked.sizes:
            for density in asked.densities:
                values = torch.randn(size // dtype.itemsize, generator=source).to(dtype)
                zeros = torch.rand(len(values), generator=source) >= density
                yield Subject(f"random, density {density:g}", values.masked_fill_(zeros, 0))


def _networks(asked: Options, config: TrainConfig, names: Sequence[str]) -> Iterator[Subject]:
    """Activations and their gradients, the latter also at the bitmap of the activation's frame."""
    for network in names:
        defaults, paths = NETWORKS[network]
        images = {"data": "fashion_mnist" if FASHION_MNIST.is_dir() else "digits"}
        common = {"threads": config.threads, "seed": config.seed, "batch_size": 64, **images}
        kept = trained(harness.train_config([], common | defaults), paths, asked.capture_steps)
        for path in paths:
            masked = network in MASKED and (path == paths[0] or not network.startswith("gpt"))
            activation, gradient = kept[f"{path} activation"], kept[f"{path} gradient"]
            for dtype in _dtypes(asked):
                yield Subject(f"{network} {path} activation", activation.to(dtype))
                yield Subject(f"{network} {path} gradient", gradient.to(dtype))
                if masked:
                    mask = encode(activation.to(dtype).contiguous())
                    yield Subject(f"{network} {path} gradient, mask reused", gradient.to(dtype), mask)


def trained(config: TrainConfig, paths: Sequence[str], num_steps: int) -> dict[str, Tensor]:
    """Train a network; return the outputs of modules in the last step, and the gradients of these."""
    job, kept = harness.Job(config), dict[str, Tensor]()
    torch.set_deterministic_debug_mode("default")  # a setting of jobs
    network = job.model()

    def keep(name: str, tensor: Tensor) -> None:
        kept[name] = tensor.detach().clone()  # an operation in place may change it later

    def listen(path: str, output: Tensor) -> None:
        keep(f"{path} activation", output)
        output.register_hook(lambda gradient: keep(f"{path} gradient", gradient))

    for path in paths:
        network.get_submodule(path).register_forward_hook(lambda *call, path=path: listen(path, call[-1]))
    optimizer = job.optimizer(network.named_parameters())
    for inputs, targets in islice(cycle(job.batches(num_steps)), num_steps):
        optimizer.zero_grad()
        loss(network(inputs.clone()), targets).backward()
        optimizer.step()
    return kept


def _integers(asked: Options, config: TrainConfig) -> Iterator[Subject]:
    """Indices of a max-pool, tokens and labels, as torch makes them: int64."""
    wide, labels = _convolved(config)
    yield Subject("max-pool indices", F.max_pool2d(F.relu(wide), 2, return_indices=True)[1])
    text = build.samples({"_target_": "penstock.pipeline.data.text.load"})
    yield Subject("tokens", next(text.batches("train", batch_size=512, seed=config.seed))[0])
    yield Subject("labels", labels)


def _masks(asked: Options, config: TrainConfig) -> Iterator[Subject]:
    """Booleans: where a ReLU passes, what a dropout keeps, what a causal attention sees."""
    source = torch.Generator().manual_seed(config.seed)
    yield Subject("ReLU mask", _convolved(config)[0] > 0)
    yield Subject("dropout mask, keeps 0.9", torch.rand(4 << 20, generator=source) < 0.9)
    yield Subject("causal mask", torch.ones(2048, 2048, dtype=torch.bool).tril())


def _convolved(config: TrainConfig) -> tuple[Tensor, Tensor]:
    """Output of a convolution on a batch of images, and their labels."""
    samples = build.samples({"_target_": "penstock.pipeline.data.digits.load"})
    images, labels = next(samples.batches("train", batch_size=64, seed=config.seed))
    source = torch.Generator().manual_seed(config.seed)
    return F.conv2d(images, torch.randn(32, images.size(1), 3, 3, generator=source)), labels


def _job(asked: Options, config: TrainConfig) -> Iterator[Subject]:
    """Tensors that cross the cuts of the job in its last micro-batch, all stages in this process."""
    job, kept = harness.Job(config), dict[str, Tensor]()
    plan = dataclasses.replace(decide(config, job.samples), codec="raw")
    pipe = Pipeline(job.model(), plan, loss=loss, optimizer=job.optimizer, seed=config.seed)

    def leaving(message: Message, item: Tensor) -> None:
        if item.is_floating_point():
            what = "activation" if message.answers is None else "gradient"
            kept[f"{message.name} {what}"] = item.detach().clone()

    pipe.policy.observed, pipe.policy.leaving = lambda messages: max(messages.routes), leaving
    for batch in islice(cycle(job.batches(asked.capture_steps)), asked.capture_steps):
        pipe.step(*batch)
    torch.set_deterministic_debug_mode("default")
    yield from (Subject(name, tensor) for name, tensor in kept.items())


def _dtypes(asked: Options) -> list[torch.dtype]:
    return [getattr(torch, name) for name in asked.dtypes]


CLASSES: dict[str, Callable[[Options, TrainConfig], Iterator[Subject]]] = {
    "synthetic": _synthetic,
    "images": lambda asked, config: _networks(asked, config, ("resnet18", "vgg11")),
    "text": lambda asked, config: _networks(asked, config, [n for n in NETWORKS if n.startswith("gpt")]),
    "integers": _integers,
    "masks": _masks,
    "job": _job,
}


# Bounds.


def bound(codec: str, words: np.ndarray, dtype: torch.dtype, chosen: np.ndarray | None = None) -> float:
    """Best ratio (before / after) that the format of ``codec`` could have; inf: nothing to send.

    zero_value: bitmap, offsets and non-zero words; exponent: sign and mantissa as they are, exponents at
    their entropy; byte_plane: every plane of bytes at its entropy; narrow: the bits of the range.

    Args:
        words: Unsigned integers, the bits of a tensor of ``dtype``.
        chosen: Words to send, where a mask that both sides have says so; then there is no bitmap.
    """
    first, _, then = codec.partition("+")
    if first != "zero_value":
        num_bytes = _packed_bytes(first, words, dtype)
    elif chosen is not None:
        num_bytes = _packed_bytes(then, words[chosen], dtype)
    else:
        nonzero = sections(len(words)).values + _packed_bytes(then, words[words != 0], dtype)
        num_bytes = min(nonzero, _packed_bytes(then, words, dtype))
    return words.nbytes / num_bytes if num_bytes else inf


def _packed_bytes(codec: str, words: np.ndarray, dtype: torch.dtype) -> float:
    num, bits = len(words), 8 * words.itemsize
    if codec == "exponent" and num:
        return num * (bits - EXPONENT_BITS + entropy(_planes(words, dtype)[-1])) / 8
    if codec == "byte_plane":
        return sum(num * entropy(plane) / 8 for plane in _planes(words, dtype)) if num else 0.0
    if codec == "narrow" and num:
        signed = words.view(words.dtype.str.replace("u", "i")) if dtype.is_signed else words
        return num * max(1, (int(signed.max()) - int(signed.min())).bit_length()) / 8
    return float(words.nbytes)


def entropy(symbols: np.ndarray) -> float:
    """Bits per symbol of bytes, each coded by itself."""
    counts = np.zeros(256, np.int64)
    for start in range(0, len(symbols), CHUNK):
        counts += np.bincount(symbols[start : start + CHUNK], minlength=256)
    shares = counts[counts > 0] / max(1, len(symbols))
    return float(-(shares * np.log2(shares)).sum())


def _planes(words: np.ndarray, dtype: torch.dtype) -> list[np.ndarray]:
    """Bytes of the words, least significant first; floats rotated by a bit, so that exponents are whole."""
    if dtype.is_floating_point:
        words = (words << 1) | (words >> (8 * words.itemsize - 1))
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), words.itemsize)
    return [octets[:, k] for k in range(words.itemsize)]


# Sides: each codec in kept memory, as a stage calls it, and by encode and decode; others by their packages.


def rows_of(
    subject: Subject, kind: str, asked: Options, codecs: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each codec that applies to a tensor, after a round trip that must bring back its bits.

    ``ratio`` is before / after without headers; seconds are of the processor, on one thread."""
    tensor, mask = subject.tensor, subject.mask
    bits = min(64, 8 * tensor.itemsize)
    words = Words(tensor.data_ptr(), tensor.nbytes * 8 // bits, bits, tensor.dtype)
    pool = Pool()
    out = pool.take(max(codec.max_bytes(words.num_words, bits) for codec in codecs.values()))
    back = pool.take(max(1, tensor.nbytes))
    octets = _octets(tensor)
    numbers = octets.numpy().view(f"u{bits // 8}")
    chosen = None if mask is None else (_octets(decoded(mask)).numpy().view(numbers.dtype) != 0)
    density = (numbers != 0 if chosen is None else chosen).mean()
    facts = {"class": kind, "tensor": subject.name, "dtype": str(tensor.dtype).removeprefix("torch.")}
    facts |= {"num_bytes": tensor.nbytes, "density": float(density), "mask": mask is not None}
    copy = lambda: ctypes.memmove(back.data_ptr(), words.address, words.num_bytes)  # noqa: E731
    common: Routes = {"copy": copy, "clone": tensor.clone}
    batch = max(1, BATCH_BYTES // max(1, tensor.nbytes))

    def row(name: str, num_bytes: int, sent_as: str, routes: Routes, **more: Any) -> dict[str, Any]:
        ratio = {"ratio": tensor.nbytes / max(1, num_bytes)}
        measured = _measured(common | routes, asked.repeats, batch)
        return facts | more | {"codec": name, "sent_as": sent_as} | ratio | measured

    for name in (name for name in asked.codecs if name in codecs and applies(name, subject)):
        frame = encode(tensor, name, mask=mask)
        routes = _kept(name, frame, mask, words, out, back, codecs)
        packed, header, start = routes["pack"](), read_header(frame), header_bytes(tensor.dim())
        assert packed == (header.codec, header.payload_bytes), f"{name} has two payloads of one tensor"
        assert torch.equal(out[: packed.num_bytes], frame[start:]), f"{name} has two payloads of one tensor"
        back.fill_(255)
        routes["unpack"]()
        expected = numbers if chosen is None else np.where(chosen, numbers, 0)
        for result in (_octets(decoded(frame, mask)), back[: len(octets)]):
            assert np.array_equal(result.numpy().view(numbers.dtype), expected), f"{name} changed a bit"
        if asked.isa is None:
            routes |= _public(tensor, name, frame, mask)
        best = bound(name, numbers, tensor.dtype, chosen)
        more = {"by": "penstock", "bound": best if isfinite(best) else None}
        yield row(name, packed.num_bytes, packed.codec, routes, **more)
    for name, (pack, unpack) in (peers() if mask is None else {}).items():
        if name in asked.codecs:
            packed = pack(numbers)
            assert unpack(packed, numbers.nbytes) == numbers.tobytes(), f"{name} changed a bit"
            routes = Routes(pack=lambda pack=pack: pack(numbers))
            routes["unpack"] = lambda unpack=unpack, packed=packed: unpack(packed, numbers.nbytes)
            yield row(name, len(packed), name, routes, by="others", bound=None)


def applies(codec: str, subject: Subject) -> bool:
    """True if a codec is for tensors of this dtype, and for a mask if there is one."""
    if subject.mask is not None and not has_bitmap(codec):
        return False
    if codec.endswith("exponent"):
        return subject.tensor.dtype in (torch.bfloat16, torch.float32)
    return codec != "narrow" or not subject.tensor.dtype.is_floating_point


def _kept(
    name: str, frame: Tensor, mask: Tensor | None, words: Words, out: Tensor, back: Tensor, codecs: Any
) -> Routes:
    """Pack and unpack without header and new memory; the bitmap of a mask is looked up as a stage does."""
    header, into = read_header(frame), words._replace(address=back.data_ptr())
    start, num_bytes = header_bytes(len(header.sizes)), header.payload_bytes
    codec, reader, to = codecs[name], codecs[header.codec], out.data_ptr()
    if not header.flags:
        return {
            "pack": lambda: codec.pack(words, to),
            "unpack": lambda: reader.unpack(frame.data_ptr() + start, num_bytes, into),
        }
    inner, outer = (codecs.get(codec.partition("+")[2]) for codec in (name, header.codec))

    def pack() -> Any:
        bitmap = None if mask is None else bitmap_in(mask, header.dtype, header.geometry)
        assert bitmap is not None, "a mask that was used has a bitmap"
        return pack_masked(words, bitmap, to, inner)

    def unpack() -> None:
        bitmap = bitmap_for(header, mask)
        unpack_masked(frame.data_ptr() + start, num_bytes, bitmap, into, outer)

    return {"pack": pack, "unpack": unpack}


def _public(tensor: Tensor, name: str, frame: Tensor, mask: Tensor | None = None) -> Routes:
    return {
        "encode": lambda: encode(tensor, name, mask=mask),
        "decode": lambda: decode(frame, mask=mask),
    }


def peers() -> dict[str, tuple[Callable[[Any], Any], Callable[[Any, int], Any]]]:
    """Pack and unpack of the other packages that are installed, each on one thread, into new memory."""
    import lz4.block
    import zstandard

    compress, decompress = zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress
    found: dict[str, Any] = {
        "lz4": (
            lambda words: lz4.block.compress(words, store_size=False),
            lambda packed, num_bytes: lz4.block.decompress(packed, uncompressed_size=num_bytes),
        ),
        "zstd_1": (lambda words: compress(words.data), lambda packed, _: decompress(packed)),
    }
    if find_spec("blosc2"):  # not among the requirements
        blosc2 = importlib.import_module("blosc2")
        blosc2.set_nthreads(1)
        for name in ("shuffle", "bitshuffle"):  # lz4 after it, as users choose it for speed
            kind = getattr(blosc2.Filter, name.upper())
            found[f"blosc2_{name}"] = (
                lambda words, kind=kind: blosc2.compress(words, words.itemsize, 5, kind, blosc2.Codec.LZ4),
                lambda packed, _: blosc2.decompress(packed),
            )
    return found


def call_overhead(asked: Options) -> list[dict[str, Any]]:
    """Seconds of a call of the public functions on float32 tensors so small that little else counts."""
    rows = []
    for num_bytes in SMALL_BYTES:
        tensor = torch.relu(torch.randn(num_bytes // 64, 16, generator=torch.Generator().manual_seed(0)))
        for name in (name for name in asked.codecs if name in CODECS and name != "narrow"):
            routes = {"clone": tensor.clone, **_public(tensor, name, encode(tensor, name))}
            seconds = _measured(routes, asked.repeats, CALLS)
            rows.append({"codec": name, "num_bytes": num_bytes} | {route: seconds[route] for route in routes})
    return rows


def _measured(routes: Routes, repeats: int, batch: int) -> dict[str, Any]:
    """Number of runs, and median seconds of a call of each route; all have run once before."""
    # Processor time leaves out what others on the machine run in between; it is of one thread alone.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    sides = {name: timed(call, batch, clock=clock) for name, call in routes.items()}
    taken = alternate(sides, repeats, seconds=SECONDS, clock=clock)
    return {"runs": len(taken["clone"]), **medians(taken)}


def decoded(frame: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the tensor of a frame that has one."""
    tensor = decode(frame, mask=mask)
    assert tensor is not None, "this frame carries a tensor"
    return tensor


def _octets(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


if __name__ == "__main__":
    harness.main(options(), bench)
