"""A signal ends the command even where Python cannot hear it: in the middle of one long call."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

LONG = """
import sys
import torch
from penstock.scripts import command, train
torch.set_num_threads(1)
weights = torch.zeros(9000, 9000)
def long(arguments):
    print("begins", flush=True)
    while True:
        weights @ weights
train.main = long
sys.argv = ["penstock", "train"]
command.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_ends_a_command_in_the_middle_of_a_long_layer(again):
    with subprocess.Popen(
        [sys.executable, "-c", LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        time.sleep(0.5)  # until it is in the middle
        process.send_signal(signal.SIGINT)
        if again:  # at once
            process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    assert process.returncode in ((130, 143) if again else (130,))  # the system tells two in any order
    assert error.startswith("penstock: stopped by Ctrl-C, and cut off") != again
