"""Attention residuals: each layer reads the outputs of all earlier ones, across four stages.

torchrun --nproc-per-node 4 scripts/examples/attention_residuals.py 20

A value that many layers read passes every cut behind which one of them is; nothing of the model says so.
Source: Kimi Team, Attention Residuals, arXiv:2603.15031 (2026), section 3.
"""

import copy
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import penstock

LAYERS, WIDTH, LENGTH, WORDS, BATCH, MICRO_BATCHES = 8, 32, 16, 50, 16, 4


class Earlier(nn.Module):
    """A mix of all earlier outputs, by the softmax of a learned query over their depth."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.norm = nn.Parameter(torch.zeros(WIDTH)), nn.RMSNorm(WIDTH)

    def forward(self, *outputs: Tensor) -> Tensor:
        """Return (batch, length, WIDTH) for tensors of that shape."""
        values = torch.stack(outputs)
        shares = (self.norm(values) @ self.query).softmax(0)
        return (shares.unsqueeze(-1) * values).sum(0)


class Network(nn.Module):
    """Layers that are joined by nothing but such mixes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.reads = nn.ModuleList(Earlier() for _ in range(LAYERS + 1))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits (batch, length, WORDS) for int64 words (batch, length)."""
        outputs = [self.embed(words)]
        for read, layer in zip(self.reads, self.layers, strict=False):
            outputs.append(layer(read(*outputs)))
        return self.head(self.reads[-1](*outputs))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all words."""
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def main(steps: int = 20) -> None:
    """Train the network in four stages, and beside it in a plain loop with accumulated gradients."""
    torch.manual_seed(0)
    model, words = Network(), torch.randint(WORDS, (steps, BATCH, LENGTH + 1))
    plain = copy.deepcopy(model)
    update = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    example = (words[0, : BATCH // MICRO_BATCHES, :-1],)
    made = {"stages": 4, "micro_batches": MICRO_BATCHES, "loss": loss}
    optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)  # noqa: E731
    pipe = penstock.Pipeline.of(model, example, **made, optimizer=optimizer)
    for batch in words:
        report = pipe.step(batch[:, :-1], batch[:, 1:])
        for part in batch.chunk(MICRO_BATCHES):
            (loss(plain(part[:, :-1].clone()), part[:, 1:].clone()) / MICRO_BATCHES).backward()
        update.step()
        update.zero_grad()
        if pipe.rank == 0:
            print(f"step {report.step}: loss {report.loss:.6f}")
    trained = pipe.state_dict()["model"]  # whole on rank 0
    if pipe.rank == 0:
        same = all(torch.equal(trained[name], tensor) for name, tensor in plain.state_dict().items())
        print(pipe.plan, f"weights of the plain loop: {'the same bits' if same else 'DIFFERENT'}", sep="\n")
    pipe.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
