"""Real lifetimes: every storage of a forward and its backward, placed within 2 % of what lives at once."""

import pytest
from lifetimes import buffers_of
from test_arena import max_live, peak

from penstock.stages.memory.arena import place

NETWORKS = ["resnet18", "resnet50", "vgg11_bn", "densenet121", "mobilenet_v3_small", "gpt"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_of_a_network_is_laid_close_to_what_lives_at_once(name: str) -> None:
    buffers = buffers_of(name)
    live, high = max_live(buffers), peak(buffers, place(buffers))
    print(
        f"{name}: {len(buffers)} buffers, {live} bytes at once, laid in {high} ({high / live - 1:.3%} more)"
    )
    assert len(buffers) > 100
    assert high <= 1.02 * live
