"""One small model for each way in which a cut can change the bits; all are cut at every layer."""

import torch
from torch import nn
from torch.nn import functional as F


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(192, 20), nn.Linear(20, 20), nn.Linear(20, 20)
        self.end, self.norm = nn.Linear(20, 10), nn.BatchNorm1d(20)
        self.weight, self.one = nn.Parameter(torch.randn(20)), nn.Parameter(torch.ones(1))


class InPlaceFirst(Base):
    """An in-place layer is the first of its stage: a leaf would refuse it."""

    def forward(self, x):
        return self.end(F.relu(self.a(x.flatten(1)), inplace=True))


class InPlaceAfterNorm(Base):
    """A received value is written to while an earlier stage has saved it."""

    def forward(self, x):
        y = F.relu(self.norm(self.a(x.flatten(1))), inplace=True)
        return self.end(y)


class NoGradientBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * 2 + 0 * y.sum()

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * 2, None


@torch.fx.wrap
def half_deaf(x, y):
    return NoGradientBack.apply(x, y)


class NoGradient(Base):
    """A backward that answers None: upstream must get no gradient, not zeros."""

    def forward(self, x):
        p = self.a(x.flatten(1))
        q = self.b(p.detach())
        return self.end(half_deaf(p, q)) + 0.0 * self.norm(self.c(p)).sum()


class Sizes(Base):
    """A size crosses, and differs between micro-batches."""

    def forward(self, x):
        batch = x.size(0)
        return self.end(self.b(self.a(x.flatten(1))).view(batch, -1))


class Halves(Base):
    """Slices with gaps into a vectorised kernel: a dense copy moves its boundary."""

    def __init__(self):
        super().__init__()
        self.wide, self.end = nn.Linear(192, 48), nn.Linear(24, 10)

    def forward(self, x):
        a, b = self.wide(x.flatten(1)).chunk(2, 1)
        return self.end(F.gelu(a) * b)


class Misaligned(nn.Module):
    """A misaligned operand of a matrix product: an aligned copy takes another kernel."""

    def __init__(self):
        super().__init__()
        self.start, self.end = nn.Linear(192, 2 * 1025), nn.Linear(1025, 10)

    def forward(self, x):
        return self.end(self.start(x.flatten(1)).chunk(2, 1)[1])


class Transposed(Base):
    """The gradient arrives with other strides than its value has."""

    def forward(self, x):
        y = F.gelu(self.a(x.flatten(1)))
        return self.end((self.b(y).t().reshape(20, -1) + y.t() * 1.5).t())


class Expanded(Base):
    """A value and a gradient of stride 0."""

    def forward(self, x):
        y = F.gelu(self.a(x.flatten(1)))
        return y.sum(0, keepdim=True).expand(y.shape[0], 20)[:, :10] + self.end(y)


class GapsInGradient(Base):
    """The gradient of a concatenation's part is a slice with gaps."""

    def forward(self, x):
        y = F.silu(self.a(x.flatten(1)))
        z = torch.cat([self.norm(y), y], 1)
        return self.end(z[:, :20]) + self.end(z[:, 20:])


class OnePixel(nn.Module):
    """channels_last strides of a tensor with one pixel."""

    def __init__(self):
        super().__init__()
        self.a, self.pool = nn.Conv2d(3, 16, 3, padding=1), nn.AdaptiveAvgPool2d(1)
        self.b, self.c, self.end = nn.Conv2d(16, 24, 1), nn.Conv2d(24, 24, 1), nn.Linear(24, 10)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.end(self.c(F.silu(self.b(self.pool(F.silu(self.a(x)))))).flatten(1))


class ReadThrice(Base):
    """Parameters read by themselves, three times each."""

    def forward(self, x):
        weight = self.weight
        y = self.b(self.a(x.flatten(1)) * weight) * self.weight + self.one
        return self.end(torch.tanh(y) * self.weight * self.one)


class CalledFourTimes(Base):
    """One Linear called in four stages."""

    def forward(self, x):
        y = self.b(self.a(x.flatten(1)))
        for _ in range(2):
            y = torch.tanh(self.b(y))
        return self.end(self.b(y))


class Negative(Base):
    """Gradients that are -0.0: a sum that starts from zeros loses the sign."""

    zero: torch.Tensor

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(192))
        self.register_buffer("zero", torch.full((192,), -0.0))

    def forward(self, x):
        return self.end(-torch.relu(self.a(x.flatten(1) + self.shift * self.zero)))


class Wide(nn.Module):
    """Wide enough for frames to shrink, so that gradients travel at the bitmap of their values."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.end = nn.Linear(192, 576), nn.Linear(576, 576), nn.Linear(576, 10)


class InfiniteAtZero(Wide):
    """A ReLU whose gradient is infinite where its output is zero; NaN where the next one's is zero."""

    def forward(self, x):
        y = torch.sqrt(F.relu(self.a(x.flatten(1))))
        return self.end(self.b(y).clamp(-1, 1) * y)


class ReluOfManyUsers(Wide):
    """The output of a ReLU is read by several stages, its gradient comes back along the chain."""

    def forward(self, x):
        y = F.relu6(self.a(x.flatten(1)))
        return self.end(torch.tanh(self.b(y)) * y) + y[:, :10] + F.relu_(self.b(y) + y)[:, -10:]


class PoolOfRelu(nn.Module):
    """Overlapping windows of a max-pool over a ReLU, and of one over dropout, which proves nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.end = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 1), nn.Linear(288, 10)
        self.drop = nn.Dropout()

    def forward(self, x):
        y = F.max_pool2d(F.relu(self.a(x)), 3, 2, 1)
        return self.end(F.max_pool2d(self.drop(F.relu(self.b(y) + 0.5)), 2, 1).flatten(1))


class Conjugate(nn.Module):
    """A lazy conjugate crosses behind layer conj while the memory that it shares is saved as it is."""

    def __init__(self):
        super().__init__()
        self.a, self.end = nn.Linear(192, 512), nn.Linear(512, 10)

    def forward(self, x):
        y = torch.view_as_complex(self.a(x.flatten(1)).view(-1, 256, 2))
        w, z = y * y, y.conj()
        return self.end(torch.view_as_real((w * z * z).resolve_conj()).flatten(1))


class ParameterCalledRelu(Wide):
    """A shared parameter that is named like a layer: its zeros prove nothing."""

    def __init__(self):
        super().__init__()
        self.relu = nn.Parameter(torch.randn(576) * (torch.arange(576) % 2))

    def forward(self, x):
        y = torch.tanh(self.b(self.a(x.flatten(1)) * self.relu)) + self.relu
        return self.end(torch.tanh(y) * self.relu)


class OneLayoutOfMany(Base):
    """A layer whose bias is a product's at some sizes, a sum's at others: only one of them can wait."""

    def __init__(self):
        super().__init__()
        self.small = nn.Linear(5, 5)

    def forward(self, x):
        y = torch.tanh(self.b(self.a(x.flatten(1))))
        z = y.mean(0).view(-1, 2 - x.size(0) % 2, 5).transpose(0, 1)
        return self.end(y + torch.tanh(self.small(z)).reshape(-1))


class SmallMasks(Base):
    """A size crosses in a tensor that is freed at once; as small ones are made and saved behind it."""

    def forward(self, x):
        rows = x.size(0)
        y = self.a(x.flatten(1))
        for _ in range(8):
            y = y * y.new_empty(2, 1).fill_(3.0)[:1]
        return self.end(y.view(rows, -1) / 3**8)


@torch.fx.wrap
def last_use(x):
    total = x.sum()
    x.untyped_storage().resize_(0)
    return total


class Freed(Base):
    """A layer frees what came without a gradient; what is made behind it is as large."""

    def forward(self, x):
        y = self.a(x.flatten(1))
        y = y + last_use(y.detach() - 1) / 1e6
        for _ in range(3):
            y = y.sigmoid().exp().tanh()
        return self.end(y)


@torch.fx.wrap
def doubled_unseen(x):
    x.data.mul_(2)
    return x


class WrittenUnseen(Base):
    """A layer writes, where autograd counts no write, to what one has saved and others save and read."""

    def forward(self, x):
        y = doubled_unseen(self.a(x.flatten(1)).exp())
        return self.end(y * y.cos())


class Scaled(nn.Module):
    """Hands torch a function that reads the module it came from, in a backward."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(20))

    def forward(self, x):
        y = x * 2
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * self.scale.detach().norm())
        return y + self.scale


class HookInForward(Base):
    """A hook reads the weights of now, not those of when the forward was recorded."""

    def __init__(self):
        super().__init__()
        self.scaled = Scaled()

    def forward(self, x):
        return self.end(self.scaled(self.a(x.flatten(1))))


class TiedInTraining(Base):
    """The layer ``b`` runs twice in training, once in eval mode, where another stage would run it."""

    def forward(self, x):
        y = self.a(x.flatten(1))
        if self.training:
            y = y + 0.1 * self.b(y)
        return self.end(torch.relu(self.b(torch.tanh(self.c(y)))))


class FrozenTwice(Base):
    """A frozen layer that two stages run: each holds a copy, and a load must reach both."""

    def __init__(self):
        super().__init__()
        self.b.requires_grad_(False)

    def forward(self, x):
        y = self.a(x.flatten(1))
        return self.end(torch.relu(self.b(torch.tanh(self.c(y + 0.1 * self.b(y))))))


class GoesOnAsItIs(Base):
    """A parameter, and a frozen one, that layers return as they are: one tensor under several names."""

    def __init__(self):
        super().__init__()
        self.one.requires_grad_(False)

    def forward(self, x):
        scale, one = self.weight.contiguous().float(), self.one.contiguous().float()
        return self.end(torch.tanh(self.a(x.flatten(1))) * scale * one) * scale[:10] * one


class Unsaved(Base):
    """A running mean that its state_dict leaves out, and buffers of which a file may say too little."""

    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(20), persistent=False)
        for name, tensor in {
            "repeated": torch.ones(1).expand(5),
            "empty": torch.zeros(0, 3),
            "number": torch.tensor(7),
            "float8": torch.ones(3).to(torch.float8_e4m3fn),
            "complex": torch.ones(2, dtype=torch.complex64),
            "flag": torch.tensor([True]),
        }.items():
            self.register_buffer(name, tensor)

    def forward(self, x):
        y = torch.relu(self.a(x.flatten(1)))
        if self.training:
            self.mean.mul_(0.9).add_(y.detach().mean(0))
        return self.end(y - self.mean)


class Differentiated(Base):
    """An activation's own gradient is taken in forward: what it depends on runs in one stage with that."""

    def forward(self, x):
        with torch.enable_grad():
            y = self.a(x.flatten(1)).detach().requires_grad_()
            energy = self.end(torch.tanh(self.b(y))).sum()
            (force,) = torch.autograd.grad(energy, y, create_graph=self.training)
        return self.end(force)


class TurnedInPlace(Base):
    """An activation is transposed in place, and back."""

    def forward(self, x):
        y = self.a(x.flatten(1)) * 1
        y.t_()
        y = y * 2
        y.t_()
        return self.end(y)


class CastsBack(Base):
    """A float32 result goes on in the dtype that another layer had: autocast's, if it is on."""

    def forward(self, x):
        y = self.a(x.flatten(1))
        z = torch.tanh(self.b(y).float()).to(y.dtype)
        return self.end(torch.bmm(y.unsqueeze(1), z.unsqueeze(2)).squeeze(2) * z)


OF_A_FILE = torch.linspace(-1, 1, 20)


class FileConstant(Base):
    """A tensor of the file is read, which no micro-batch brings and no size changes."""

    def forward(self, x):
        return self.end(torch.relu(self.a(x.flatten(1)) - OF_A_FILE))


class ByItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x * module.weight.detach()

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * ctx.module.weight.detach(), None


class Handing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(20) + 0.5)

    def forward(self, x):
        return ByItself.apply(x, self) * self.weight


class Handed(Base):
    """A backward function of a person's is handed a module, and reads a weight that trains."""

    def __init__(self):
        super().__init__()
        self.handing = Handing()

    def forward(self, x):
        return self.end(self.b(self.handing(self.a(x.flatten(1)))))


class Teacher(Base):
    """Frozen parameters follow trained ones in every forward, as in MoCo and BYOL; functions read one."""

    def __init__(self):
        super().__init__()
        self.c.requires_grad_(False)
        self.weight.requires_grad_(False)

    def forward(self, x):
        if self.training:
            self.weight.data.mul_(0.9)
        x = torch.relu(self.a(x.flatten(1)))
        with torch.no_grad():
            if self.training:
                for ours, theirs in zip(self.c.parameters(), self.b.parameters(), strict=True):
                    ours.data.mul_(0.9).add_(theirs.data, alpha=0.1)
                self.c.bias.lerp_(self.b.bias, 0.1)
            keys = torch.tanh(self.c(x))
        return self.end(self.b(x) * keys * self.weight[:1] + x * self.weight)


SHARED = ("Base", "Wide", "Scaled", "Handing")
TRAPS = {
    name: kind
    for name, kind in list(globals().items())
    if isinstance(kind, type) and issubclass(kind, nn.Module) and name not in SHARED
}
