"""Where tests of kernels for a GPU put their tensors: on one, or on the CPU where kernels are interpreted."""

import pytest
from gpus import DEVICE


@pytest.fixture(params=[DEVICE])
def device(request: pytest.FixtureRequest) -> str:
    return request.param
