"""A batch as micro-batches: sizes, shares, fresh memory."""

import pytest
import torch

from penstock.compression.errors import PlanError
from penstock.pipeline.runtime.batches import micro_batches


def test_sizes_differ_by_at_most_one_and_shares_are_python_floats():
    parts = micro_batches((torch.arange(11.0),), torch.arange(11), 3, None)
    assert [len(part.inputs[0]) for part in parts] == [4, 4, 3]
    assert [part.share for part in parts] == [4 / 11, 4 / 11, 3 / 11]
    assert torch.cat([part.inputs[0] for part in parts]).tolist() == list(range(11))
    assert torch.cat([part.targets for part in parts]).tolist() == list(range(11))


def test_micro_batches_lie_in_fresh_aligned_memory():
    batch = torch.randn(10, 3, 7, 7)  # views of it are misaligned
    assert {x.data_ptr() % 64 for x in batch.tensor_split(3)} != {0}
    parts = micro_batches((batch,), torch.zeros(10), 3, None)
    assert {part.inputs[0].data_ptr() % 64 for part in parts} == {0}
    kept = batch.clone()
    for number in (3, 1):  # a layer may write to its input
        micro_batches((batch,), torch.zeros(10), number, None)[0].inputs[0].zero_()
    assert torch.equal(batch, kept)


def test_channels_last_stays_channels_last():
    batch = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    parts = micro_batches((batch,), torch.zeros(4), 2, None)
    assert all(part.inputs[0].is_contiguous(memory_format=torch.channels_last) for part in parts)


def test_targets_may_be_a_tuple_or_a_dict():
    targets = {"label": torch.arange(4), "box": (torch.arange(8).view(4, 2), "note")}
    parts = micro_batches((torch.zeros(4),), targets, 2, None)
    assert parts[1].targets["label"].tolist() == [2, 3]
    assert parts[1].targets["box"][0].tolist() == [[4, 5], [6, 7]]
    assert parts[1].targets["box"][1] == "note"


def test_a_constant_goes_whole_to_every_micro_batch():
    mask = torch.eye(3)
    parts = micro_batches((mask, torch.arange(4.0)), None, 2, None, whole=(True, False))
    assert [part.inputs[1].tolist() for part in parts] == [[0.0, 1.0], [2.0, 3.0]]
    assert all(torch.equal(part.inputs[0], mask) for part in parts)
    assert parts[0].inputs[0].data_ptr() != parts[1].inputs[0].data_ptr()
    with pytest.raises(PlanError, match=r"traced as penstock.Constant\(tensor\)"):
        micro_batches((mask, torch.arange(4.0)), None, 2, None)


WANTS = torch.ones(4, requires_grad=True)


@pytest.mark.parametrize(
    ("inputs", "targets", "weight", "told"),
    [
        (torch.ones(4), torch.zeros(5), None, "same number of samples"),
        (torch.ones(0, 3), torch.zeros(0), None, "same number of samples"),
        (WANTS, torch.zeros(4), None, "gradients of parameters, not of a batch.*detach"),
        (torch.ones(4), WANTS, None, "gradients of parameters, not of a batch.*detach"),
        (torch.ones(4), torch.zeros(4), lambda targets: 0, "sum to more than zero, found 0"),
    ],
)
def test_a_batch_that_cannot_be_shared_out_is_refused(inputs, targets, weight, told):
    with pytest.raises(PlanError, match=told):
        micro_batches((inputs,), targets, 2, weight)
