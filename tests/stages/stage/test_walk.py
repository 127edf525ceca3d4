"""The walk tells what keeps saved tensors which layer is done and which comes next."""

from itertools import pairwise

import pytest
from cases import Case, pipeline_of, plan_of
from zoo import build


@pytest.mark.parametrize("tier", [pytest.param("device", marks=pytest.mark.slow), "packed"])
def test_every_layer_is_told_when_it_is_done_and_which_comes_next(tier):
    case = Case(model="resnet18", cuts=["relu", "layer1_0_relu_1"], tier=tier, micro_batches=2, steps=1)
    plan, _ = plan_of(case)
    model, batches = build(case.model, case.dtype, 1)
    pipe = pipeline_of(case, plan, model)
    told, kept = {index: [] for index in pipe.stages}, {index: [] for index in pipe.stages}
    with pytest.MonkeyPatch.context() as patch:
        for index, stage in pipe.stages.items():

            def listen(done, following, *, index=index, tell=stage.saved.layer_done):
                told[index].append((done, following))
                tell(done, following)

            def look(micro_batch, came, went, *, index=index, saved=stage.saved, offload=stage.saved.offload):
                run = vars(saved)["_micro_batches"][micro_batch]
                kept[index] += [view.layer for storage in run.alive() for view in storage.views]
                offload(micro_batch, came, went)

            patch.setattr(stage.saved, "layer_done", listen)
            if tier == "packed":
                patch.setattr(stage.saved, "offload", look)
        pipe.step(*batches[0])
        wanted = {
            index: list(
                pairwise(
                    [None, *(v.layer for v in pipe.engine.meter.step.messages.routes[0][index].visits), None]
                )
            )
            for index in pipe.stages
        }
        before = {index: list(calls) for index, calls in told.items()}
        pipe.evaluate(batches[0][0])
    assert told == before == {index: calls * case.micro_batches for index, calls in wanted.items()}
    if tier == "packed":
        assert all(0 < len(kept[i]) and set(kept[i]) <= {done for done, _ in wanted[i][1:]} for i in kept)
    pipe.close()
