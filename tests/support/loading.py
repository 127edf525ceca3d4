"""Data sets that a loader is tried on; in a file of their own, since a process that is spawned imports it."""

import os
import random
import signal
import time

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

NUMBER = 23


def write_images(root, **splits):
    """Write so many images of either class for each split, every one with other pixels; return the root."""
    source = torch.Generator().manual_seed(0)
    for split, number in splits.items():
        for name in ("cats", "dogs"):
            (root / split / name).mkdir(parents=True)
            for index in range(number):
                pixels = torch.randint(256, (9, 7, 3), dtype=torch.uint8, generator=source)
                Image.fromarray(pixels.numpy()).save(root / split / name / f"{index}.png")
    return str(root)


class Numbered(Dataset):
    """So many samples: each a number, and its index."""

    def __len__(self):
        return NUMBER

    def __getitem__(self, index):
        return torch.tensor([float(index)]), torch.tensor(index)


class Drawn(Numbered):
    """Draws from all the generators that people draw from, and adds up in an order of its own."""

    def __getitem__(self, index):
        noise = torch.rand(3) * random.random() * float(np.random.rand())
        many = torch.linspace(0, 1, 100_003) * (index + 1)
        return noise + many.sum(), torch.tensor(index)


class Stream(IterableDataset):
    """Tells its epoch, and draws."""

    epoch = -1

    def __len__(self):
        return NUMBER

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in range(NUMBER):
            yield torch.rand(2) + 100 * self.epoch + index, torch.tensor(index)


class Damaged(Numbered):
    """A data set some of whose samples cannot be read."""

    def __init__(self, *damaged):
        self.damaged = damaged

    def __getitem__(self, index):
        if index in self.damaged:
            raise OSError(5, "Input/output error")
        return super().__getitem__(index)


class Deadly(Numbered):
    """A data set whose reader is killed at a sample."""

    def __getitem__(self, index):
        if index == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Slow(Numbered):
    """Takes a moment for each sample."""

    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


class Where(Numbered):
    """Tells who reads."""

    def __getitem__(self, index):
        return torch.tensor([float(os.getpid())]), torch.tensor(torch.get_num_threads())
