"""Speed and ratio of every codec on every class of tensors, next to a copy, lz4, zstd and blosc2.

Whatever is timed has been checked bit for bit."""

import ctypes
import functools
import importlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
import torch
import torch.nn.functional as F
from harness import Options, Results, alternate, medians, timed
from torch import Tensor

from penstock.compression.buffers import Pool
from penstock.compression.codec import CODECS, decode, encode
from penstock.compression.frame import header_bytes, read_header
from penstock.compression.geometry import Words
from penstock.compression.kernels import jit
from penstock.compression.names import lossless
from penstock.compression.zero_value import has_bitmap
from penstock.pipeline.run import build
from penstock.pipeline.run.losses import cross_entropy as loss
from penstock.stages.units import parse_bytes, show_bytes

Routes = dict[str, Callable[[], Any]]
PEERS = ("lz4", "zstd_1", "blosc2_shuffle", "blosc2_bitshuffle")
SPEEDS = {"pack": "copy", "unpack": "copy", "encode": "clone", "decode": "clone"}
BATCH_BYTES, SECONDS = 2 << 20, 0.4  # a small tensor is timed many times; seconds for all runs of a side
SEED, STEPS = 0, 10  # that a network trains before its tensors are taken
BLOCKS = ("blocks.1.activation", "blocks.1")
# Options of a job, and the modules whose outputs are taken.
NETWORKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "resnet18": ({"model": "resnet18"}, ("relu", "layer1", "layer3")),
    "vgg11": ({"model": "torchvision", "model.name": "vgg11"}, ("features.1", "features.7", "features.14")),
    "gpt gelu": ({"model": "gpt", "model.activation": "gelu", "data": "text"}, BLOCKS),
    "gpt relu": ({"model": "gpt", "model.activation": "relu", "data": "text"}, BLOCKS),
    "gpt relu2": ({"model": "gpt", "model.activation": "relu2", "data": "text"}, BLOCKS),
}
# Their first module is a ReLU, behind which gradients are zero.
MASKED = ("resnet18", "vgg11", "gpt relu")
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
COLUMNS: dict[str, Any] = {
    "codec": lambda row: row["codec"] + ("" if row["sent_as"] == row["codec"] else f" -> {row['sent_as']}"),
    "ratio": "{ratio:.3f}",
    **{verb: lambda row, verb=verb, of=of: f"{row[of] / row[verb]:.2f}" for verb, of in SPEEDS.items()},
}


def options() -> Any:
    """Return the parser of the command line."""
    made = harness.parser(__doc__, repeats=9)
    listed, add = harness.list_of, made.add_argument
    add("--classes", type=listed(known=CLASSES), default=list(CLASSES), help=f"of {', '.join(CLASSES)}")
    known = (*lossless(), *PEERS)
    add("--codecs", type=listed(known=known), default=list(known), help="codecs, Penstock's and others'")
    size = partial(parse_bytes, name="sizes")
    add("--sizes", type=listed(size), default=[32 << 20], help="bytes of synthetic tensors, such as 32MiB")
    density = harness.at_least(0.0)
    add("--densities", type=listed(density), default=[0.1, 0.5, 0.9, 1.0], help="share of non-zero elements")
    dtypes = ("float64", "float32", "float16", "bfloat16")
    add("--dtypes", type=listed(known=dtypes), default=["float32", "bfloat16"], help="dtypes of floats")
    return made


def bench(asked: Options, path: Path) -> Results:
    """Measure every codec on every class of tensors; results are printed and kept tensor by tensor."""
    torch.set_num_threads(1)
    results = Results(path, threads=1, isa=jit.host_isas()[0], rows=[])
    packages = {name: version(name) for name in ("lz4", "zstandard", "blosc2") if find_spec(name)}
    results.content["versions"] |= packages
    for kind in asked.classes:
        for subject in CLASSES[kind](asked):
            tensor = subject.tensor.detach().contiguous()
            rows = list(rows_of(subject._replace(tensor=tensor), kind, asked))
            results.keep(rows=rows)
            facts = "{tensor}: {class} {dtype}, {density:.1%} not zero".format_map(rows[0])
            harness.show(rows, COLUMNS, title=f"{facts}, {show_bytes(tensor.nbytes)}")
    print("pack and unpack as multiples of a copy to kept memory; encode and decode of tensor.clone()")
    return results


# Tensors: random ones, and those of networks that have trained. Only real tensors say what a codec saves.


class Subject(NamedTuple):
    """A tensor, and the frame whose bitmap says where it matters, if there is one."""

    name: str
    tensor: Tensor
    mask: Tensor | None = None


def _synthetic(asked: Options) -> Iterator[Subject]:
    source = torch.Generator().manual_seed(SEED)
    for dtype in (getattr(torch, name) for name in asked.dtypes):
        for size in asked.sizes:
            for density in asked.densities:
                values = torch.randn(size // dtype.itemsize, generator=source).to(dtype)
                zeros = torch.rand(len(values), generator=source) >= density
                yield Subject(f"random, density {density:g}", values.masked_fill_(zeros, 0))


def _networks(asked: Options, *, images: bool) -> Iterator[Subject]:
    """Activations and their gradients, the latter also at the bitmap of the activation's frame."""
    for network, (defaults, paths) in NETWORKS.items():
        if network.startswith("gpt") == images:
            continue
        data = "fashion_mnist" if FASHION_MNIST.is_dir() else "digits"
        kept = trained({"threads": 1, "batch_size": 64, "data": data} | defaults, paths)
        for path in paths:
            masked = network in MASKED and (path == paths[0] or images)
            activation, gradient = kept[f"{path} activation"], kept[f"{path} gradient"]
            for dtype in (getattr(torch, name) for name in asked.dtypes):
                yield Subject(f"{network} {path} activation", activation.to(dtype))
                yield Subject(f"{network} {path} gradient", gradient.to(dtype))
                if masked:
                    mask = encode(activation.to(dtype).contiguous())
                    yield Subject(f"{network} {path} gradient, mask reused", gradient.to(dtype), mask)


def trained(options: Mapping[str, Any], paths: tuple[str, ...]) -> dict[str, Tensor]:
    """Train a network; return the outputs of modules in the last step, and the gradients of these."""
    job, kept = harness.Job(harness.train_config([], options)), dict[str, Tensor]()
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
    for inputs, targets in islice(cycle(job.batches(STEPS)), STEPS):
        optimizer.zero_grad()
        loss(network(inputs.clone()), targets).backward()
        optimizer.step()
    return kept


def _integers(asked: Options) -> Iterator[Subject]:
    """Indices of a max-pool, tokens and labels (int64); where a ReLU passes, what a dropout keeps."""
    source = torch.Generator().manual_seed(SEED)
    digits = build.samples({"_target_": "penstock.pipeline.data.digits.load"})
    images, labels = next(digits.batches("train", batch_size=64, seed=SEED))
    wide = F.conv2d(images, torch.randn(32, images.size(1), 3, 3, generator=source))
    yield Subject("max-pool indices", F.max_pool2d(F.relu(wide), 2, return_indices=True)[1])
    text = build.samples({"_target_": "penstock.pipeline.data.text.load"})
    yield Subject("tokens", next(text.batches("train", batch_size=512, seed=SEED))[0])
    yield Subject("labels", labels)
    yield Subject("ReLU mask", wide > 0)
    yield Subject("dropout mask, keeps 0.9", torch.rand(4 << 20, generator=source) < 0.9)


CLASSES: dict[str, Callable[[Options], Iterator[Subject]]] = {
    "synthetic": _synthetic,
    "images": partial(_networks, images=True),
    "text": partial(_networks, images=False),
    "integers": _integers,
}


# Sides: each codec in kept memory, and by encode and decode; others by their packages.


def rows_of(subject: Subject, kind: str, asked: Options) -> Iterator[dict[str, Any]]:
    """Yield a row for each codec that applies to a tensor, after a round trip that must bring back its bits.

    ``ratio`` is before / after without headers; seconds are of the processor, on one thread."""
    tensor, mask = subject.tensor, subject.mask
    bits = min(64, 8 * tensor.itemsize)
    words = Words(tensor.data_ptr(), tensor.nbytes * 8 // bits, bits, tensor.dtype)
    pool = Pool()
    out = pool.take(max(codec.max_bytes(words.num_words, bits) for codec in CODECS.values()))
    back = pool.take(max(1, tensor.nbytes))
    numbers = _octets(tensor).numpy().view(f"u{bits // 8}")
    chosen = None if mask is None else (_octets(decoded(mask)).numpy().view(numbers.dtype) != 0)
    density = (numbers != 0 if chosen is None else chosen).mean()
    facts = {"class": kind, "tensor": subject.name, "dtype": str(tensor.dtype).removeprefix("torch.")}
    facts |= {"num_bytes": tensor.nbytes, "density": float(density), "mask": mask is not None}
    copy = functools.partial(ctypes.memmove, back.data_ptr(), words.address, words.num_bytes)
    common: Routes = {"copy": copy, "clone": tensor.clone}
    batch = max(1, BATCH_BYTES // max(1, tensor.nbytes))

    def row(name: str, num_bytes: int, sent_as: str, routes: Routes) -> dict[str, Any]:
        # Processor time leaves out what others on the machine run in between.
        sides = {name: timed(call, batch, clock=time.thread_time) for name, call in (common | routes).items()}
        taken = alternate(sides, asked.repeats, seconds=SECONDS, clock=time.thread_time)
        ratio = {"ratio": tensor.nbytes / max(1, num_bytes)}
        row = {"codec": name, "sent_as": sent_as, "runs": len(taken["clone"])}
        return facts | row | ratio | medians(taken)

    for name in (name for name in asked.codecs if name in CODECS and applies(name, subject)):
        frame = encode(tensor, name, mask=mask)
        header, start = read_header(frame), header_bytes(tensor.dim())
        routes: Routes = {
            "encode": lambda name=name: encode(tensor, name, mask=mask),
            "decode": lambda frame=frame: decode(frame, mask=mask),
        }
        if mask is None:  # in kept memory, as a stage calls it
            into, payload, num_bytes = (
                words._replace(address=back.data_ptr()),
                frame[start:],
                header.payload_bytes,
            )
            routes["pack"] = partial(CODECS[name].pack, words, out.data_ptr())
            routes["unpack"] = partial(CODECS[header.codec].unpack, payload.data_ptr(), num_bytes, into)
            packed = routes["pack"]()
            assert packed == (header.codec, num_bytes), f"{name} has two payloads of one tensor"
            assert torch.equal(out[:num_bytes], payload), f"{name} has two payloads of one tensor"
            back.fill_(255)
            routes["unpack"]()
            assert torch.equal(back[: tensor.nbytes], _octets(tensor)), f"{name} changed a bit"
        expected = numbers if chosen is None else np.where(chosen, numbers, 0)
        result = _octets(decoded(frame, mask)).numpy().view(numbers.dtype)
        assert np.array_equal(result, expected), f"{name} changed a bit"
        yield row(name, header.payload_bytes, header.codec, routes)
    for name, (pack, unpack) in (peers() if mask is None else {}).items():
        if name in asked.codecs:
            packed = pack(numbers)
            assert unpack(packed, numbers.nbytes) == numbers.tobytes(), f"{name} changed a bit"
            routes = {"pack": partial(pack, numbers), "unpack": partial(unpack, packed, numbers.nbytes)}
            yield row(name, len(packed), name, routes)


def applies(codec: str, subject: Subject) -> bool:
    """True if a codec is for tensors of this dtype, and for a mask if there is one."""
    if subject.mask is not None and not has_bitmap(codec):
        return False
    is_float = subject.tensor.dtype.is_floating_point
    return is_float if codec.endswith("exponent") else codec != "narrow" or not is_float


def peers() -> dict[str, tuple[Callable[[Any], Any], Callable[[Any, int], Any]]]:
    """Pack and unpack of the other packages that are installed, each on one thread, into new memory."""
    import lz4.block
    import zstandard

    compress, decompress = zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress
    lz4_pack, lz4_unpack = partial(lz4.block.compress, store_size=False), lz4.block.decompress
    found: dict[str, Any] = {
        "lz4": (lz4_pack, lambda packed, num_bytes: lz4_unpack(packed, uncompressed_size=num_bytes)),
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


def decoded(frame: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the tensor of a frame that has one."""
    tensor = decode(frame, mask=mask)
    assert tensor is not None, "this frame carries a tensor"
    return tensor


def _octets(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


if __name__ == "__main__":
    harness.main(options(), bench)
