"""Fashion-MNIST: real files read where they lie, plain or gzipped, refused where they cannot be read."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from penstock import ConfigError
from penstock.pipeline.data.fashion_mnist import load, read_idx


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def write(file: Path, data: bytes, *, gzipped: bool) -> None:
    file = file.with_name(f"{file.name}.gz") if gzipped else file
    file.write_bytes(gzip.compress(data) if gzipped else data)


def fashion(folder: Path, *, gzipped: bool = False) -> np.ndarray:
    """Write a Fashion-MNIST of 6 and 4 images and return the first 6."""
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (10, 28, 28), dtype=np.uint8)
    for stem, chosen in (("train", slice(0, 6)), ("t10k", slice(6, 10))):
        write(folder / f"{stem}-images-idx3-ubyte", idx(pixels[chosen]), gzipped=gzipped)
        labels = np.arange(10, dtype=np.uint8)[chosen]
        write(folder / f"{stem}-labels-idx1-ubyte", idx(labels), gzipped=gzipped)
    return pixels[:6]


@pytest.mark.parametrize(("inside", "gzipped"), [("", False), ("FashionMNIST/raw", True)])
def test_fashion_mnist_is_read_where_it_lies(tmp_path: Path, gzipped: bool, inside: str) -> None:
    pixels = fashion(tmp_path / "data" / inside, gzipped=gzipped)
    before = sorted(tmp_path.rglob("*"))
    samples = load(root=str(tmp_path / "data"), size=28, channels=1)
    inputs, targets = next(samples.batches("train", batch_size=6, shuffle=False))
    assert targets.tolist() == [0, 1, 2, 3, 4, 5]
    assert np.array_equal((inputs[:, 0] * 0.353 + 0.286).mul(255).round().byte().numpy(), pixels)
    assert next(samples.batches("test", batch_size=4))[1].tolist() == [6, 7, 8, 9]
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_folder_says_where_it_looked_and_how_to_get_the_data() -> None:
    with pytest.raises(ConfigError, match=r"data.root=/nowhere .*/FashionMNIST/raw.*apt install.*download"):
        load(root="/nowhere")


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    whole = idx(np.zeros((3, 2, 2), dtype=np.uint8))
    file, packed = tmp_path / "train-images-idx3-ubyte", tmp_path / "t10k-images-idx3-ubyte.gz"
    huge, other = whole[:4] + b"\xff" * 12 + whole[16:], b"\0\0\x0d" + whole[3:]
    for damaged in (whole[:-1], whole + b"0", other, b"", huge):
        file.write_bytes(damaged)
        packed.write_bytes(gzip.compress(damaged))
        for one in (file, packed):
            with pytest.raises(ConfigError, match=one.name.split("-")[0]):
                read_idx(one.with_suffix(""), num_dims=3)
    file.write_bytes(whole)
    assert read_idx(file, num_dims=3).shape == (3, 2, 2)


def test_every_truncation_and_alteration_of_a_gzipped_file_is_read_or_refused(tmp_path: Path) -> None:
    packed = gzip.compress(idx(np.arange(12, dtype=np.uint8).reshape(3, 2, 2)))
    file = tmp_path / "images.gz"
    altered = [
        bytes([*packed[:at], packed[at] ^ 1 << bit, *packed[at + 1 :]])
        for at in range(len(packed))
        for bit in range(8)
    ]
    for data in [packed[:end] for end in range(len(packed))] + altered:
        file.write_bytes(data)
        try:
            assert read_idx(file, num_dims=3).flatten().tolist() == list(range(12))
        except ConfigError:
            pass


def test_labels_that_do_not_belong_to_the_images_are_refused(tmp_path: Path) -> None:
    for labels in (np.arange(5, dtype=np.uint8), np.full(6, 10, dtype=np.uint8)):
        folder = tmp_path / str(len(labels))
        fashion(folder)
        (folder / "train-labels-idx1-ubyte").write_bytes(idx(labels))
        with pytest.raises(ConfigError, match="do not belong together"):
            load(root=str(folder))
