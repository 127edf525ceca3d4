"""Samples of a run's own that kill the rank which reads them, as often as files say: a data set for faults.

VICTIM: the rank; AFTER: the sample that it does not survive; each file ``kill_*`` here is one death."""

import os
import signal
from pathlib import Path

import torch
from torch.utils.data import Dataset


class Deadly(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(200, 1, 8, 8, generator=generator), torch.arange(200) % 10
        self.seen, self.classes = 0, list("0123456789")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.seen += 1
        if os.environ.get("RANK", "") == os.environ.get("VICTIM") and self.seen == int(os.environ["AFTER"]):
            for death in Path().glob("kill_*"):
                death.unlink()
                os.kill(os.getpid(), getattr(signal, os.environ.get("BY", "SIGKILL")))
        return self.x[index], int(self.y[index])


def samples():
    return Deadly(), Deadly()
