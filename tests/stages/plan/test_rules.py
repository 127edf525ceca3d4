"""Policies of the weights and the schedules that they suit: the whole product, held against a list by
hand.
"""

import contextlib
import itertools

import pytest

from penstock import PlanError
from penstock.stages.plan.validation import check_again, check_mirror, check_versions, streams
from penstock.stages.weight_versions.policies import POLICIES

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipev", "async_1f1b", "custom")


def check(**given):
    fine = {"num_stages": 3, "micro_batches": 3, "extra_in_flight": 0, "prediction": False}
    check_versions(**{"schedule": "1f1b", "weights": "latest", **fine, **given})


def test_only_these_go_together():
    accepted = set()
    for schedule, weights, prediction in itertools.product(SCHEDULES, POLICIES, (False, True)):
        with contextlib.suppress(PlanError):
            check(schedule=schedule, weights=weights, prediction=prediction)
            accepted.add((schedule, weights, prediction))
    assert accepted == {
        *((schedule, "latest", False) for schedule in SCHEDULES),
        ("async_1f1b", "stashed", False),
        ("async_1f1b", "vertical_sync", False),
        ("async_1f1b", "latest", True),
        ("async_1f1b", "stashed", True),
        ("1f1b", "double_buffered", False),
    }


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"weights": "newest"}, "latest, stashed, vertical_sync, double_buffered, found 'newest'"),
        ({"weights": "stashed"}, "^weights=stashed .* schedule=1f1b"),
        ({"prediction": True}, "^prediction=true .* schedule=async_1f1b"),
        ({"schedule": "async_1f1b", "weights": "vertical_sync", "prediction": True}, "and so does"),
        ({"schedule": "gpipe", "weights": "double_buffered"}, "take schedule=1f1b"),
        ({"weights": "double_buffered", "prediction": True}, "weights=latest or weights=stashed"),
        ({"weights": "double_buffered", "micro_batches": 2}, "raise micro_batches to 3"),
        ({"weights": "double_buffered", "extra_in_flight": 1}, "^weights=double_.* extra_in_flight=1"),
        ({"schedule": "async_1f1b", "extra_in_flight": 2}, "^schedule=async_1f1b .* extra_in_flight=2"),
    ],
)
def test_what_does_not_is_refused_by_name(given, told):
    with pytest.raises(PlanError, match=told):
        check(**given)


STASHED, DOUBLE = ({"weights": name} for name in ("stashed", "double_buffered"))
FED_BACK = r"^error_feedback=true .* found schedule=\w+ weights=\w+; take"
OTHERS = [
    (check_mirror, {"prediction": True, "parameters_tier": "device"}, None),
    (check_mirror, {"prediction": False, "parameters_tier": "host"}, None),
    (check_mirror, {"prediction": False, "parameters_tier": "device", "error_feedback": True}, None),
    (check_mirror, {"prediction": True, "parameters_tier": "host"}, "prediction=true and parameters host"),
    (
        check_mirror,
        {"prediction": False, "parameters_tier": "disk", "error_feedback": True},
        "found error_feedback=true and parameters disk",
    ),
    (check, DOUBLE | {"error_feedback": True}, None),
    *((check, given | {"error_feedback": True}, FED_BACK) for given in ({}, {"schedule": "zb_h1"})),
    (check, STASHED | {"schedule": "async_1f1b", "error_feedback": True}, FED_BACK),
    (check_again, STASHED | {"prediction": False}, None),
    (check_again, STASHED | {"prediction": True}, r"weights of the first time.*recompute=false"),
    (check_again, {"weights": "latest", "prediction": False}, r"of the first time.*recompute=false"),
]


@pytest.mark.parametrize(("rule", "given", "told"), OTHERS)
def test_mirrors_errors_and_second_forwards_go_with_some_weights_alone(rule, given, told):
    with contextlib.nullcontext() if told is None else pytest.raises(PlanError, match=told):
        rule(**given)


def test_extra_in_flight_stays_for_synchronous_schedules():
    check(extra_in_flight=2)
    assert not streams("1f1b", "latest")
    assert streams("1f1b", "double_buffered")
    assert streams("async_1f1b", "latest")
