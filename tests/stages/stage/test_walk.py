"""The walk tells what keeps saved tensors which layer is done and which comes next."""

from itertools import pairwise

import pytest
from cases import Case, pipeline_with_batches


@pytest.mark.parametrize("tier", [pytest.param("device", marks=pytest.mark.slow), "packed"])
def test_every_layer_is_told_when_it_is_done_and_which_comes_next(tier):
    case = Case(model="resnet18", cuts=["relu", "layer1_0_relu_1"], tier=tier, micro_batches=2, steps=1)
    pipe, batches = pipeline_with_batches(case)
    told = {index: [] for index in pipe.stages}
    with pytest.MonkeyPatch.context() as patch:
        for index, stage in pipe.stages.items():

            def listen(done, following, *, index=index):
                told[index].append((done, following))

            patch.setattr(stage, "observers", (*stage.observers, listen))
        pipe.step(*batches[0])
        routes = pipe.meter.step.messages.routes[0]
        wanted = {
            index: list(pairwise([None, *(visit.layer for visit in routes[index].visits), None]))
            for index in pipe.stages
        }
        before = {index: list(calls) for index, calls in told.items()}
        pipe.evaluate(batches[0][0])
    assert told == before == {index: calls * case.micro_batches for index, calls in wanted.items()}
    pipe.close()
