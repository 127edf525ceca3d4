"""Device of the tensors in tests of GPU kernels: a GPU, or the CPU where kernels are interpreted."""

import pytest
from gpus import DEVICE


@pytest.fixture(params=[DEVICE])
def device(request: pytest.FixtureRequest) -> str:
    return request.param
