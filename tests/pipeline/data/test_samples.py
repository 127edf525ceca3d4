"""Data sets: the same batches for the same (seed, epoch), and what the digits and the text hold."""

import gzip
import importlib
import os
import random
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image
from torch.utils.data import TensorDataset

import penstock.conf
from penstock import ConfigError, in_threads
from penstock.pipeline.data import Description, Samples
from penstock.pipeline.data.fashion_mnist import load, read_idx
from penstock.pipeline.data.image_folder import SCALES
from penstock.pipeline.data.storage import check_shared, listing, local_copy

SAMPLES = {
    name: importlib.import_module(f"penstock.pipeline.data.{name}").load
    for name in ("digits", "fake", "fashion_mnist", "image_folder", "text")
}


def own(num_samples: int = 10) -> Samples:
    numbers = TensorDataset(torch.arange(num_samples).float(), torch.arange(num_samples))
    return Samples(train=numbers, test=numbers, describe=Description(num_classes=num_samples, input_shape=()))


def order(samples: Samples, *, seed: int = 0, epoch: int = 0) -> list[list[int]]:
    batches = samples.batches("train", batch_size=4, seed=seed, epoch=epoch, drop_last=False)
    return [targets.tolist() for _, targets in batches]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    first = order(own(), seed=1, epoch=2)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert order(own(), seed=1, epoch=2) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted(chain.from_iterable(first)) == list(range(10))
    assert [len(batch) for batch in first] == [4, 4, 2]
    others = [order(own(), seed=seed, epoch=epoch) for seed, epoch in ((1, 3), (2, 2), (2, 1), (12, 0))]
    assert len({str(other) for other in [first, *others]}) == 5


def test_the_order_is_the_same_on_every_machine() -> None:
    assert order(own()) == [[4, 5, 7, 2], [8, 6, 0, 3], [1, 9]]  # a literal: a run of last year must repeat


class Draws(torch.utils.data.Dataset):
    """Samples that are drawn from every generator that people use."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([torch.rand(()), random.random(), np.random.rand()]), index


def test_what_a_sample_draws_depends_on_seed_epoch_and_batch_alone() -> None:
    samples = Samples(train=Draws(), test=Draws(), describe=Description(num_classes=10, input_shape=(3,)))

    def drawn(split: Any = "train", *, seed: int = 1, epoch: int = 2, first: int = 0) -> list[Any]:
        options: Any = {"batch_size": 4, "seed": seed, "epoch": epoch, "drop_last": False, "first": first}
        return [inputs.tolist() for inputs, _ in samples.batches(split, **options)]

    expected = drawn()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()  # pyright: ignore
    assert drawn() == expected
    assert drawn(first=1) == expected[1:]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before[1:]  # pyright: ignore
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    assert drawn() == expected
    others = [drawn(seed=2), drawn(epoch=3), drawn("test")]
    every = [number for one in (expected, *others) for batch in one for row in batch for number in row]
    assert len(set(every)) == len(every) == 4 * 10 * 3


def test_train_drops_the_last_batch_and_test_keeps_all_in_order() -> None:
    samples = own()
    assert next(samples.batches("test", batch_size=3))[0].tolist() == [0.0, 1.0, 2.0]
    assert [len(targets) for _, targets in samples.batches("train", batch_size=4)] == [4, 4]
    tested = [targets.tolist() for _, targets in samples.batches("test", batch_size=6)]
    assert tested == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    for split in ("train", "test"):
        for batch_size in (1, 3, 5, 10):
            for drop_last in (None, True, False):
                batches = list(samples.batches(split, batch_size=batch_size, drop_last=drop_last))
                assert len(batches) == samples.num_batches(split, batch_size=batch_size, drop_last=drop_last)


def test_what_no_split_can_give_is_refused() -> None:
    for batch_size in (11, 0, -1):
        with pytest.raises(ConfigError, match=f"batch_size={batch_size} "):
            next(own().batches("train", batch_size=batch_size))
    with pytest.raises(ConfigError, match="valid"):
        own().num_samples("valid")  # pyright: ignore[reportArgumentType]


def test_digits_come_resized_and_normalised() -> None:
    inputs, targets = next(SAMPLES["digits"]().batches("train", batch_size=1437))
    assert (inputs.shape, inputs.dtype, inputs.is_contiguous()) == ((1437, 3, 32, 32), torch.float32, True)
    assert (targets.shape, targets.dtype) == ((1437,), torch.int64)
    assert torch.equal(inputs[:, 0], inputs[:, 2])
    small, _ = next(SAMPLES["digits"](size=8, channels=1).batches("train", batch_size=1437))
    assert small.shape == (1437, 1, 8, 8)
    assert abs(small.mean().item()) < 0.01
    assert abs(small.std().item() - 1) < 0.01


@pytest.mark.parametrize(
    ("name", "options", "values"),
    [
        ("digits", ("size", "channels"), (0, 1.5, "big", True)),
        ("fake", ("num_samples", "num_classes", "size", "channels"), (0, 1.5, "big")),
        ("fake", ("seed",), (1.5, "big")),
        ("text", ("length",), (0,)),
    ],
)
def test_numbers_of_no_data_set_are_refused(name: str, options: Any, values: Any) -> None:
    for option in options:
        for value in values:
            with pytest.raises(ConfigError, match=rf"data\.{option}={value} "):
                SAMPLES[name](**{option: value})


def test_an_image_that_no_memory_holds_is_refused() -> None:
    with pytest.raises(ConfigError, match="makes an image of more than"):
        SAMPLES["fake"](size=10**8)


def test_text_is_characters_and_the_next_ones(tmp_path: Path) -> None:
    text = ("bäd c\r\n" * 20)[:139]  # 125 to train: the last one has no next, so 24 windows of 5
    (tmp_path / "text").write_bytes(text.encode())
    samples = SAMPLES["text"](path=str(tmp_path / "text"), length=5)
    vocabulary = samples.describe.vocabulary
    assert vocabulary == "".join(sorted(set(text)))
    assert samples.describe.num_classes == len(vocabulary)
    assert samples.describe.input_shape == (5,)
    assert (samples.num_samples("train"), samples.num_samples("test")) == (24, 2)
    inputs, targets = next(samples.batches("train", batch_size=24, shuffle=False))
    assert inputs.dtype == targets.dtype == torch.int64
    assert "".join(vocabulary[number] for number in inputs.flatten()) == text[:120]
    assert "".join(vocabulary[number] for number in targets.flatten()) == text[1:121]
    inputs, targets = next(samples.batches("test", batch_size=9))
    assert "".join(vocabulary[number] for number in inputs.flatten()) == text[125:135]
    assert "".join(vocabulary[number] for number in targets.flatten()) == text[126:136]


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "text"
    with pytest.raises(ConfigError, match=f"data.path={file} .*cannot be read"):
        SAMPLES["text"](path=str(file))
    for content, why in ((b"a\xff" * 1000, "not UTF-8"), (b"short", "5 characters"), (b"", "0 characters")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"data.path={file} .*{why}"):
            SAMPLES["text"](path=str(file))
    assert SAMPLES["text"]().num_samples("train") > 5000


def test_every_data_set_is_a_choice_of_the_command_line() -> None:
    folder = Path(penstock.conf.__path__[0], "data")
    files = [file for file in folder.glob("*.yaml") if file.stem != "own"]
    chosen = {file.stem: OmegaConf.select(OmegaConf.load(file), "_target_") for file in files}
    assert chosen == {name: f"{load.__module__}.{load.__name__}" for name, load in SAMPLES.items()}


def test_fake_images_are_drawn_one_by_one_from_their_numbers() -> None:
    samples = SAMPLES["fake"](num_samples=9, num_classes=3, size=5, channels=2, seed=4)
    assert (samples.num_samples("train"), samples.num_samples("test")) == (9, 3)
    assert samples.describe == Description(num_classes=3, input_shape=(2, 5, 5))
    inputs, targets = next(samples.batches("train", batch_size=9, shuffle=False))
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((9, 2, 5, 5), torch.float32, torch.int64)
    assert set(targets.tolist()) <= {0, 1, 2}
    torch.manual_seed(99)
    more = SAMPLES["fake"](num_samples=20, num_classes=3, size=5, channels=2, seed=4)
    for index in (0, 8):  # however many there are, and whatever else was drawn
        alone, target = more.train[index]  # pyright: ignore[reportIndexIssue]
        assert torch.equal(alone.view(torch.int32), inputs[index].view(torch.int32))
        assert target == targets[index]
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(99).get_state())


def image_folder(root: Path, *, test: str = "test") -> Path:
    """Write three images of two classes for either split: red in cats, blue in dogs."""
    for split in ("train", test):
        for name, colour in (("cats/1.png", (255, 0, 0)), ("dogs/1.jpg", (0, 0, 255)), ("dogs/2.png", 0)):
            file = root / split / name
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB" if colour else "L", (7, 5), colour).save(file)
    return root


@pytest.mark.parametrize("test", ["test", "val"])
def test_an_image_folder_is_read_class_by_class(tmp_path: Path, test: str) -> None:
    samples = SAMPLES["image_folder"](root=str(image_folder(tmp_path, test=test)), size=4)
    assert samples.describe == Description(num_classes=2, input_shape=(3, 4, 4))
    for split in ("train", "test"):
        inputs, targets = next(samples.batches(split, batch_size=3, shuffle=False))
        assert (inputs.shape, inputs.dtype, inputs.is_contiguous()) == ((3, 3, 4, 4), torch.float32, True)
        assert (targets.tolist(), targets.dtype) == ([0, 1, 1], torch.int64)
        mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in SCALES[3])
        pixels = inputs * deviation + mean
        assert torch.allclose(pixels[0, :, 0, 0], torch.tensor([1.0, 0.0, 0.0]), atol=1e-6)
        assert torch.allclose(pixels[1, :, 0, 0], torch.tensor([0.0, 0.0, 1.0]), atol=0.02)  # jpg
    grey = SAMPLES["image_folder"](root=str(tmp_path), size=2, channels=1)
    assert next(grey.batches("test", batch_size=2))[0].shape == (2, 1, 2, 2)


def test_an_image_folder_that_is_none_says_what_it_must_hold(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.root=/nowhere must hold train/CLASS/\*.png"):
        SAMPLES["image_folder"](root="/nowhere")
    root = image_folder(tmp_path)
    for name in ("train/birds/none.txt", "test/birds/1.txt"):  # a class without images
        (root / name).parent.mkdir()
        (root / name).touch()
        with pytest.raises(ConfigError, match=f"data.root={root} must hold .*birds") as refused:
            SAMPLES["image_folder"](root=str(root))
        assert "\n" not in str(refused.value)
        (root / name).unlink()
        (root / name).parent.rmdir()
    (root / "test" / "dogs").rename(root / "test" / "wolves")
    with pytest.raises(ConfigError, match="the class dogs in one split only"):
        SAMPLES["image_folder"](root=str(root))
    for option, value in (("size", 0), ("channels", 2)):
        with pytest.raises(ConfigError, match=f"data.{option}={value}"):
            SAMPLES["image_folder"](root=str(root), **{option: value})


def test_an_image_that_cannot_be_decoded_is_refused_by_name(tmp_path: Path) -> None:
    root = image_folder(tmp_path)
    for damage in (b"", b"no image", b"\x89PNG\r\n\x1a\n"):
        (root / "train" / "cats" / "1.png").write_bytes(damage)
        with pytest.raises(ConfigError, match=f"{root}/train/cats/1.png is not an image that can be read"):
            next(SAMPLES["image_folder"](root=str(root)).batches("train", batch_size=3))


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


def test_labels_that_do_not_belong_to_the_images_are_refused(tmp_path: Path) -> None:
    for labels in (np.arange(5, dtype=np.uint8), np.full(6, 10, dtype=np.uint8)):
        folder = tmp_path / str(len(labels))
        fashion(folder)
        (folder / "train-labels-idx1-ubyte").write_bytes(idx(labels))
        with pytest.raises(ConfigError, match="do not belong together"):
            load(root=str(folder))


def said(places: list[Path]) -> list[str]:
    """Message of each rank whose files are at its place."""

    def run(world: Any) -> str:
        try:
            check_shared({"root": str(places[world.rank])}, rank=world.rank, gather=world.all_gather_json)
        except ConfigError as error:
            return str(error)
        return ""

    return in_threads(run, ranks=len(places))


@pytest.fixture
def images(tmp_path):
    return image_folder(tmp_path / "images")


def test_what_rank_0_writes_all_must_read_and_nothing_stays(images, tmp_path):
    before = listing(images)
    assert said([images] * 3) == ["", "", ""]
    other = tmp_path / "other"
    other.mkdir()
    for place in (other, tmp_path / "nowhere"):
        told = said([images, images, place])
        assert all("is not the same storage for all ranks: rank 2 does not find" in one for one in told)
        assert all("data.local=PATH" in one for one in told)
    assert listing(images) == before
    assert not [name for name in os.listdir(images) if name.startswith(".")]


def test_where_nobody_may_write_names_and_sizes_agree(images, tmp_path, monkeypatch):
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "touch", refused)
    copy = Path(local_copy({"root": str(images)}, str(tmp_path / "copies"))["root"])
    assert said([images, copy]) == ["", ""]
    (copy / "train/dogs/3.png").write_bytes(b"more")
    assert all("rank 1 does not find" in one for one in said([images, copy]))


def test_a_local_copy_is_made_once_and_anew_when_the_files_change(images, tmp_path):
    options = {"root": str(images), "size": 8}
    local = str(tmp_path / "deep" / "local")
    first = local_copy(options, local)
    copy = Path(first["root"])
    assert first["size"] == 8
    assert (copy / "train/cats/1.png").read_bytes() == (images / "train/cats/1.png").read_bytes()
    assert listing(copy) == listing(images)
    made = copy.stat().st_mtime_ns
    assert local_copy(options, local) == first
    assert copy.stat().st_mtime_ns == made
    (images / "train/cats/1.png").write_bytes(b"other")
    second = Path(local_copy(options, local)["root"])
    assert second != copy
    assert (second / "train/cats/1.png").read_bytes() == b"other"
    assert {name for name in os.listdir(local) if name.startswith(".")} == {".penstock_lock"}


def test_a_file_is_copied_too_and_what_cannot_be_is_refused(images, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("penstock")
    found = local_copy({"path": str(text)}, str(tmp_path / "local"))
    assert Path(found["path"]).read_text() == "penstock"
    for options in ({"size": 8}, {"root": "/nowhere"}):
        with pytest.raises(ConfigError, match="and there is none"):
            local_copy(options, str(tmp_path))
    with pytest.raises(ConfigError, match=r"data.local=.*text.txt/local: .* cannot be copied there"):
        local_copy({"root": str(images)}, str(text / "local"))


def test_what_is_mounted_to_be_read_only_is_read(images):
    mounted = f"mount --bind {images} {images} && mount -o remount,bind,ro {images} && cd {images}"
    look = f"""
from penstock.pipeline.data.storage import check_shared
for options in ({{"root": "{images}"}}, {{}}):
    check_shared(options, rank=0, gather=lambda item: [item, item])
"""
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f'{mounted} && exec "$0" -c "$1"', sys.executable, look],
        capture_output=True,
        text=True,
    )
    if "not permitted" in done.stderr:
        pytest.skip("mounting needs root")
    assert done.returncode == 0, done.stderr
