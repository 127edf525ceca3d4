"""Laws L1 and L2 as a sampled product: whatever is combined, training has the bits of the plain loop.

By default every two values of two factors meet once, and every trap meets a drawn rest of them; with --all
there are a thousand cases more. What once failed by its very combination stands in ``REGRESSIONS``."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import CUSTOM, SCHEDULERS, Case
from product import (
    FACTORS,
    STREAMS,
    case_of,
    differences,
    draws,
    pairs,
    stream_of,
    unsuited,
    unsuited_streams,
)
from sampling import is_whole, number_of, seed_of
from streams import StreamCase
from traps import TRAPS

from penstock.pipeline.schedules import SCHEDULES
from penstock.stages.plan.plan import TIERS
from penstock.stages.weight_versions.policies import POLICIES

pytestmark = pytest.mark.filterwarnings("ignore:the model was recorded anew:UserWarning")

RANDOM = {"synchronous": 1000, "asynchronous": 300}
LAID_OUT = {"model": (*FACTORS["model"], "residual_channels_last")}
ORDERS = {"schedule": ("zb_h1", "zbv")}, {"weights_first": (True,)}
"""Of a backward: a trap meets it in halves or with its weights first, and with --all both."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draw the cases by the seed of the run."""
    seed, name = number_of(seed_of(metafunc.config)), metafunc.function.__name__
    if name == "test_every_two_values_of_two_factors":
        rows = pairs(FACTORS, seed, unsuited), pairs(STREAMS, seed, unsuited_streams)
    elif name == "test_every_trap":
        one = dict.fromkeys(("dtype", "autocast"), (None,)) | {"replicas": (1,), "bare": (False,)}
        alone = [FACTORS | one | order for order in ORDERS]  # some are complex, or normed
        traps = [each | {"model": (trap,)} for trap in TRAPS for each in alone]
        if not is_whole(metafunc.config):
            traps = [traps[2 * place + (place + seed) % 2] for place in range(len(TRAPS))]
        rows = [next(draws(trap, seed + place, unsuited)) for place, trap in enumerate(traps)], ()
    elif name == "test_at_random" and is_whole(metafunc.config):
        rows = (
            itertools.islice(draws(FACTORS | LAID_OUT, seed, unsuited), RANDOM["synchronous"]),
            itertools.islice(draws(STREAMS, seed, unsuited_streams), RANDOM["asynchronous"]),
        )
    elif name == "test_at_random":
        rows = (), ()
    else:
        return
    cases = [case_of(row, seed + number) for number, row in enumerate(rows[0])]
    cases += [stream_of(row, seed + number) for number, row in enumerate(rows[1])]
    metafunc.parametrize("case", cases, ids=str)


def test_every_two_values_of_two_factors(case, ranks):
    assert differences(case, ranks) == []


def test_every_trap(case, ranks):
    assert differences(case, ranks) == []


@pytest.mark.slow
def test_at_random(case, ranks):
    assert differences(case, ranks) == []


REGRESSIONS = [
    # A parameter that is named like a ReLU promised zeros.
    Case(model="ParameterCalledRelu", cuts="every", micro_batches=1),
    # A bias whose gradient is a product at one size, a sum at another, waited for a W that never came.
    Case(model="OneLayoutOfMany", cuts=4, schedule="zb_h1", micro_batches=4, steps=2),
    Case(model="OneLayoutOfMany", cuts=4, ranks=2, schedule="zbv", micro_batches=4, steps=2),
    # What two stages hold: tied in training alone, frozen in both; a load must reach all of it.
    Case(model="TiedInTraining", cuts=["add"], world="processes", resume="state", evaluates=True),
    Case(model="FrozenTwice", cuts=["add"], world="processes", resume="state", evaluates=True),
    # A frozen module of two stages was offloaded by one of them while the other read it.
    Case(model="FrozenTwice", cuts=2, parameters_tier="packed"),
    # A cut parted what writes to a frozen parameter from the module that holds it, and a backward read what
    # forwards of later micro-batches had written.
    Case(model="Teacher", cuts=2, ranks=2, world="processes", evaluates=True),
    # An evaluation read, on another rank than writes to it, a buffer as it was in the beginning.
    Case(model="Unsaved", cuts=["relu"], ranks=2, world="processes", evaluates=True),
    # It was measured without the autocast with which it had been traced.
    Case(model="CastsBack", cuts=3, autocast=torch.bfloat16, tier="packed"),
    # Parameters under several names are there for all their readers.
    Case(model="GoesOnAsItIs", cuts=1, parameters_tier="packed", far=True),
    # What no state_dict has, or a file says badly, on another cut than it was saved on.
    Case(model="Unsaved", cuts=["a"], resume="other"),
    *(Case(model="mlp", cuts=3, scheduler=name, steps=4, resume="other") for name in SCHEDULERS),
    # A conjugate on a cut was packed as the memory that it shares.
    Case(model="Conjugate", cuts=["conj"], schedule="gpipe", tier="packed"),
    # Memory that was freed and given out again was looked up by its address.
    Case(model="SmallMasks", cuts=["a"], tier="packed", codec="raw"),
    Case(model="Freed", cuts=["sub"], tier="packed", codec="raw"),
    # What entered a stage was freed by it, and a second run of its layers read it.
    Case(model="Freed", cuts=["sub"], recompute=True),
    # The first of two ranks has the first and the last stage, by a program of one's own.
    Case(model="mlp", cuts=3, ranks=2, schedule="custom", program=CUSTOM, world="processes"),
    Case(model="mlp", cuts=3, ranks=2, schedule="custom", program=CUSTOM, recompute=True, late=(0,)),
    # A buffer goes back when a late device has read it: frames, masks, frames of another device.
    Case(model="PoolOfRelu", cuts=["relu"], late=(0,), steps=2),
    Case(model="PoolOfRelu", cuts=["relu"], late=(0, 1), steps=2, world="processes"),
    Case(model="mlp", cuts=2, late=(0, 1), steps=2, world="processes", direct=True),
    # Gradients that no optimizer empties stay from step to step.
    Case(model="mlp", cuts=3, optimizer="no_biases", clip=None, recompute=True, parameters_tier="disk"),
    # A rank whose replica has no share of a step takes part in its sums.
    Case(
        model="mlp", cuts=2, replicas=2, shares=(3, 1, 1, 0), micro_batches=5, exact=True, world="processes"
    ),
    # Half of a backward gives gradients of batch norms, the other half those of convolutions.
    Case(
        model="residual", cuts=2, schedule="zb_h1", replicas=2, micro_batches=5, exact=True, world="processes"
    ),
    # A gradient that no optimizer took away is added to, not replaced, by the half that has its product.
    Case(
        model="mlp",
        cuts=2,
        schedule="zb_h1",
        replicas=2,
        shares=(3, 1, 1, 1),
        micro_batches=5,
        exact=True,
        optimizer="no_biases",
        world="processes",
    ),
    # The codec is chosen anew behind the twelfth step.
    Case(model="gated", cuts=3, codec="auto", tier="packed", steps=14, world="processes"),
    StreamCase(model="gated", cuts=3, codec="auto", micro_batches=2, steps=8),
    # More batches than micro-batches in flight, one sample each.
    StreamCase(model="mlp", micro_batches=1, steps=14),
]


@pytest.mark.parametrize("case", REGRESSIONS, ids=str)
def test_what_once_failed(case, ranks):
    assert differences(case, ranks) == []


RESIDUAL = ["layer1_0_conv2", "layer1_1_bn1", "layer3_0_relu"]  # inside residual blocks: two values on a cut
DENSE = ["features_denseblock1_denselayer3_conv1", "features_denseblock3_denselayer9_norm2"]
LARGE = [
    Case(model="resnet18", cuts=RESIDUAL, ranks=2, schedule="zbv", steps=1, world="processes"),
    Case(model="resnet18", cuts=2, replicas=2, exact=True, steps=1, world="processes"),
    Case(model="resnet18", cuts=3, late=(0,), schedule="zb_h1", steps=2),
    Case(model="resnet18_channels_last", cuts=3, tier="host", steps=2, codec="zero_value+byte_plane"),
    Case(model="resnet18_channels_last", cuts=3, recompute=True, weights_first=True, steps=1),
    Case(model="mobilenet", cuts="every", steps=1, codec="raw"),
    Case(model="mobilenet", cuts=2, replicas=[2, 1], exact=True, steps=1, world="processes"),
    Case(model="densenet", cuts=DENSE, schedule="zb_h1", tier="packed", codec="zero_value+lz4", steps=1),
    Case(model="densenet", cuts=2, parameters_tier="host", steps=1),
    Case(model="squeezenet", cuts=3, tier="packed", codec="byte_plane", steps=2),
    StreamCase(model="densenet", cuts=3, micro_batches=3, steps=2),
    Case(model="gpt_tied", cuts="every", tier="packed", codec="zero_value+exponent", dtype=torch.bfloat16),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_models(case, ranks):
    assert differences(case, ranks) == []


def test_every_schedule_policy_and_trap_is_a_factor():
    assert {*FACTORS["schedule"], "custom", "async_1f1b"} == set(SCHEDULES)
    assert {policy.partition(" ")[0] for policy in STREAMS["policy"]} == set(POLICIES)
    assert set(FACTORS["tier"]) == set(TIERS)


@pytest.mark.parametrize(
    ("factors", "rule"), [(FACTORS, unsuited), (STREAMS, unsuited_streams)], ids=["L1", "L2"]
)
def test_the_sample_has_every_two_values_that_go_together(factors, rule, pytestconfig):
    seed = number_of(seed_of(pytestconfig))

    def met(rows):
        return {pair for row in rows for pair in itertools.combinations(map(repr, row.items()), 2)}

    sample = list(pairs(factors, seed, rule))
    possible = met(itertools.islice(draws(factors, seed, rule), 500))
    assert not possible - met(sample)
    assert len(sample) < 120
    assert not any(map(rule, sample))
