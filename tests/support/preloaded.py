"""The state of the process that ranks are forked from: modules are imported, kernels compiled."""

# ruff: noqa: F401
import gc
import os

import matplotlib.figure
import pytest
import torch._dynamo

import penstock.pipeline.run.torchrun  # what ``train`` imports, but not that, which a process that loads
import penstock.pipeline.run.training_loop  # samples runs again
import penstock.scripts.application
from penstock.compression.codec import decode, encode
from penstock.compression.names import CODEC_NAMES

_, _, os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)  # the first led here
for name in CODEC_NAMES:
    decode(encode(torch.arange(1000.0), codec=name))
gc.freeze()  # no rank looks through it again
