"""Plans with replicas: what partition makes of a number or a list, and what it refuses."""

import pytest
from profiles import NET

from penstock.compression.errors import PlanError
from penstock.pipeline.planner.partition import partition
from penstock.stages.planner.plan import Plan


def test_a_number_is_that_of_every_stage_and_a_list_has_one_for_each(tmp_path):
    plan = partition(NET, ranks=4, replicas=2, codec="raw")
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2, 3)]
    assert plan == partition(NET, stages=2, replicas=2, codec="raw")
    assert (plan.replicas, plan.num_ranks, plan.exact) == ((2, 2), 4, False)
    assert [plan.rank_of(stage, m) for stage in range(2) for m in range(4)] == [0, 1, 0, 1, 2, 3, 2, 3]
    plan = partition(NET, replicas=[2, 1], exact=True, codec="raw")
    assert [stage.ranks for stage in plan.stages] == [(0, 1), (2,)]
    assert "replicas [2, 1] that add as one" in str(plan)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_the_cut_is_where_replicas_are_evenly_loaded():
    plan = partition(NET, replicas=[3, 1], codec="raw")
    assert [len(stage.layers) for stage in plan.stages] == [6, 2]


def test_memory_has_the_buffers_of_the_exchange():
    def parameters(**options):  # what the budget counts without what micro-batches save: NET saves nothing
        return partition(NET, stages=1, codec="raw", micro_batches=8, **options).stages[0].memory_bytes

    alone = parameters() // 3
    assert parameters(replicas=2) == 4 * alone
    assert parameters(replicas=2, exact=True) == (3 + 4 + 1) * alone


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stages": 3, "replicas": [2, 1]}, "a number for each of 2 stages, found 3 stages"),
        ({"cuts": ["conv1"], "replicas": [2]}, "a number for each of 1 stages, found 2 stages"),
        ({"replicas": []}, "found 0 stages|has a number for each"),
        ({"ranks": 3, "replicas": 2}, "take a multiple of 2 ranks, found ranks=3"),
        ({"stages": 2, "ranks": 2, "replicas": 2}, "found ranks=2 for replicas \\[2, 2\\]; take ranks=4"),
        ({"stages": 2, "replicas": 0}, 'a number from 1, a list with one for each stage, or "auto", found 0'),
        (
            {"stages": 2, "replicas": "auto"},
            "divides ranks over the stages, found none; say ranks=4",
        ),
        ({"stages": 1, "replicas": 3, "micro_batches": 2}, "found 3 replicas and micro_batches=2"),
        ({"stages": 2, "replicas": 2, "schedule": "async_1f1b"}, "no moment at which they could"),
        ({"stages": 2, "replicas": 2, "weights": "double_buffered"}, "weights=double_buffered there is no"),
        ({"stages": 2, "replicas": 2, "schedule": "zb_h1"}, "under gpipe and 1f1b"),
        ({"stages": 2, "replicas": 2, "parameters_tier": "host"}, "keep their parameters on the device"),
    ],
)
def test_what_does_not_suit_replicas_is_refused(options, said):
    with pytest.raises(PlanError, match=said):
        partition(NET, codec="raw", **options)
