"""Data sets of Hugging Face, where their package is installed: what trains, what goes through the cache."""

import contextlib
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from brokers import PAGE, broker_thread
from reference import same_bits

import penstock
from penstock import ConfigError
from penstock.pipeline.data.batches import BatchIndex, BatchReader
from penstock.pipeline.data.cache.policies import policy
from penstock.pipeline.data.loader import BatchLoader
from penstock.pipeline.data.samples import samples_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # of its own, and of what it brings
    pytest.mark.skipif(not find_spec("datasets"), reason="needs the package datasets: pip install datasets"),
]

ROWS, BATCH = 24, 5
INPUTS = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS[:, 0] > 0).long()
PLACES = [BatchIndex("train", epoch, number) for epoch in range(2) for number in range(ROWS // BATCH)]


def rows(number: int = ROWS, *, label: str = "labels") -> Any:
    datasets = import_module("datasets")
    numbers = datasets.Sequence(datasets.Value("float32"))
    features = {"inputs": numbers, label: datasets.ClassLabel(names=["no", "yes", "perhaps"])}
    columns = {"inputs": INPUTS[:number].tolist(), label: TARGETS[:number].tolist()}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features)).with_format("torch")


def given(made: Any) -> Any:
    return samples_of(made, target="my.data", batch_size=None)


@pytest.mark.parametrize("label", ["labels", "label"])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_are_the_rows_in_our_order(label, workers):
    samples = given(rows(label=label))
    assert samples.describe.num_classes == 3
    reading = BatchReader(tables={"train": samples.train}, batch_size=BATCH, seed=0)
    with contextlib.closing(BatchLoader(reading, PLACES, workers=workers)) as loader:
        for place in PLACES:
            inputs, targets = loader.take(place)
            order = reading.order("train", place.epoch).split(BATCH)[place.number]
            assert same_bits(inputs["inputs"], INPUTS[order])
            assert same_bits(targets, TARGETS[order])


def test_a_dict_of_splits_trains_and_is_tested():
    samples = given(import_module("datasets").DatasetDict(train=rows(), validation=rows(8), test=rows(4)))
    assert (samples.num_samples("train"), samples.num_samples("test")) == (ROWS, 8)
    assert "also returns test" in samples.notes[0]
    assert given(rows().train_test_split(test_size=4, seed=0)).num_samples("test") == 4


@pytest.mark.parametrize("named", [False, True])
def test_a_stream_says_what_it_needs(named):
    stream = rows().to_iterable_dataset()
    named_splits = import_module("datasets").IterableDatasetDict(train=stream)
    with pytest.raises(ConfigError, match="an IterableDataset to train, which does not tell how many"):
        given(named_splits if named else stream)


@pytest.mark.parametrize("workers", [0, 2])
def test_whole_rows_go_through_the_cache(tmp_path, workers):
    path = tmp_path / "s" / "cache.sock"
    with broker_thread(path, policy("next_use", 100 * PAGE)):
        data = penstock.cached(rows(), job="a", decoded=True, socket=path, batch_size=BATCH, epochs=2)
        for epoch in range(2):
            data.sampler.set_epoch(epoch)
            options = {"sampler": data.sampler, "num_workers": workers}
            batches = list(torch.utils.data.DataLoader(data, batch_size=BATCH, **options))
            order = torch.tensor(list(data.order(epoch)))
            assert same_bits(torch.cat([batch["inputs"] for batch in batches]), INPUTS[order])
            assert same_bits(torch.cat([batch["labels"] for batch in batches]), TARGETS[order])
        assert workers or data.through.counts.hits == ROWS
        data.through.cache.close()
