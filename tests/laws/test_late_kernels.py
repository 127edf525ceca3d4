"""Law L1 with a GPU's own kernels, in Triton's interpreter, on the device that does everything late."""

import threading

import pytest
import torch
from cases import Case
from gpus import INTERPRETED, run_interpreted
from late import LateDevice
from law import differences

from penstock.compression.gpu import frames

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_it_holds_in_the_interpreter():
    run_interpreted(__file__)


class Kernels:
    """Those of the GPU; what they tell is there when the late device is through.

    The interpreter patches triton.language while a kernel runs and puts it back after: one thread at a time.
    """

    one_at_a_time = threading.Lock()

    @classmethod
    def pack(cls, *args, **kwargs):
        with cls.one_at_a_time:
            return frames.pack(*args, **kwargs)

    @classmethod
    def unpack(cls, *args, **kwargs):
        with cls.one_at_a_time:
            return frames.unpack(*args, **kwargs)

    @staticmethod
    def header_of(work):
        work.wait()
        return frames.header_of(work)


@pytest.mark.skipif(not INTERPRETED, reason="kernels need a GPU, or the interpreter")
@pytest.mark.parametrize(
    "case",
    [
        Case(model="PoolOfRelu", cuts=["relu"], late=(0,)),
        Case(model="mlp", cuts="every", late=(0,), codec="raw"),
        Case(model="gated", cuts=3, late=(0,), codec="narrow", steps=2),
        Case(model="gpt_relu", cuts=2, late=(0,), steps=1, dtype=torch.bfloat16, codec="zero_value+exponent"),
    ],
    ids=str,
)
def test_kernels_of_a_gpu_have_the_bits_of_the_plain_loop(case, monkeypatch):
    monkeypatch.setattr(LateDevice, "kernels", Kernels)
    assert differences(case) == []
