"""Data sets that go through the sample cache; in a file of their own, for processes that are spawned."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset

NUMBER = 60


class Readable(Dataset):
    """Tells how it reads and decodes; draws while it decodes; counts what it reads."""

    def __init__(self, salt=0):
        self.salt, self.reads = salt, []

    def __len__(self) -> int:
        return NUMBER

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
        return NUMBER

    def __getitem__(self, index):
        self.asked.append(index)
        noise = torch.rand(3) if index % 3 == 0 else torch.zeros(3)
        return {"x": noise + index, "y": index, "name": f"sample {index}"}
