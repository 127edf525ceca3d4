"""A small training with faults that tests ask for: a module of somebody's own, in the working folder."""

PLANTED = """
import os
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Dropout(0.2),
                         nn.ReLU(), nn.Linear(16, 4))

class Weak(nn.ReLU):
    '''Flips one bit of what it returns, where WEAK is the first element that it is given.'''

    def forward(self, x):
        y = super().forward(x)
        if repr(x.detach().flatten()[0].item()) == os.environ.get("WEAK"):
            y = y.detach().view(torch.int32).bitwise_xor(1 << 22).view(torch.float32) - y.detach() + y
        return y

def weak():
    net = Net()
    net[2] = Weak()
    return net

def data(wrong=None, infinite=None):
    draw = torch.Generator().manual_seed(5)
    x, y = torch.randn(64, 12, generator=draw), torch.randint(4, (64,), generator=draw)
    if wrong is not None:
        y[wrong] = (y[wrong] + 1) % 4
    if infinite is not None and "FINITE" not in os.environ:
        x[infinite] = torch.inf
    table = torch.utils.data.TensorDataset(x, y)
    return table, table

def noisy(outputs, targets):
    return nn.functional.cross_entropy(nn.functional.dropout(outputs, 0.2), targets)

class Faulty(torch.optim.SGD):
    '''Flips one bit of one gradient, where FLIP names a step, the elements of a parameter, and a bit, and
    perhaps the one rank that does.'''

    def step(self, closure=None):
        at, size, bit, *rank = map(int, os.environ.get("FLIP", "-1 0 0").split())
        known = torch.distributed
        if rank and not (known.is_initialized() and rank == [known.get_rank()]):
            at = -1
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["count"] = self.state[one].get("count", 0) + 1
                if self.state[one]["count"] == at + 1 and one.numel() == size:
                    one.grad.view(torch.int32).view(-1)[3] ^= 1 << bit
        return super().step(closure)
"""
