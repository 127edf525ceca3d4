"""Data sets for a loader or the sample cache; a process that is spawned imports this file alone."""

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


SHARED = 60


class Readable(Dataset):
    """Tells how it reads and decodes; draws while it decodes; counts what it reads."""

    def __init__(self, salt=0):
        self.salt, self.reads = salt, []

    def __len__(self) -> int:
        return SHARED

    def read(self, index):
        self.reads.append(index)
        return bytes([index, self.salt]) * 3000

    def decode(self, index, data):
        drawn = torch.rand(2) * random.random() * float(np.random.rand())
        return torch.tensor(list(data[:8]), dtype=torch.float32), drawn, index

    def __getitem__(self, index):
        return self.decode(index, self.read(index))


class Drawing(Dataset):
    """Has whole samples only; every third one draws."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return SHARED

    def __getitem__(self, index):
        self.asked.append(index)
        noise = torch.rand(3) if index % 3 == 0 else torch.zeros(3)
        return {"x": noise + index, "y": index, "name": f"sample {index}"}
