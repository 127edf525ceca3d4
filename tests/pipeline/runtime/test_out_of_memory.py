"""A device without memory left: stage and micro-batch are named, and a remedy; another step may run."""

import pytest
import torch
from cases import Case, pipeline_of, plan_of
from zoo import build

from penstock import StageError

SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 4.00 GiB of which 1.00 "
    "GiB is free. See documentation for Memory Management (https://pytorch.org)"
)


def full(*_):
    raise torch.OutOfMemoryError(SAID)


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_memory_that_runs_out_is_told_in_one_sentence_with_what_helps(way):
    case = Case(model="mlp", cuts=2)
    model, batches = build(case.model)
    pipe = pipeline_of(case, plan_of(case)[0], model)
    expected = pipe.step(*batches[0]).loss
    layer, seen = model[5], []

    def hook(module, args, out):
        seen.append(1)
        if len(seen) == 2:
            full() if way == "forward" else out.register_hook(full)

    handle = layer.register_forward_hook(hook)
    with pytest.raises(StageError) as refused:
        pipe.step(*batches[1])
    told = str(refused.value)
    assert told.startswith(f"rank 0, stage 1, {way} of micro-batch 1, step 1: a stage computes in the memory")
    assert "CUDA out of memory, tried to allocate 2.00 GiB; raise micro_batches=" in told
    assert "Memory Management" not in told
    handle.remove()
    assert pipe.step(*batches[0]).loss != expected  # the weights have moved, and it goes on
