"""Loss under delayed updates, without and with error feedback, next to synchronous training.

No test can prove how well delayed gradients train, so it is measured: a transformer of characters (Python's
help topics) with the same samples in the same order, and as many seeds as repeats. It has no biases, so that
Muon updates all of it. The learning rate of each optimizer is the best of some in synchronous training, with
a seed of its own. The loss that counts is that of held-out samples behind the last step: a test in between
would drain."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F
from harness import Options, Results
from torch import Tensor, nn

import penstock
from penstock.pipeline.data import text
from penstock.stages.files import save_picture
from penstock.stages.plan.plan import Plan

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Muon": torch.optim.Muon,
}
RATES = {"AdamW": (2e-3, 4e-3, 8e-3, 16e-3), "Muon": (5e-3, 1e-2, 2e-2, 4e-2)}
POLICIES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "double_buffered": {"weights": "double_buffered"},
    "error_feedback": {"weights": "double_buffered", "error_feedback": True},
}
COLORS = {"synchronous": "#5B6470", "double_buffered": "#D55E00", "error_feedback": "#0072B2"}
WIDTH, HEADS, LAYERS, LENGTH = 64, 4, 2, 32
BATCH_SIZE, MICRO_BATCHES, WINDOW = 32, 4, 10  # steps whose losses are one point of a curve
SWEEP = 1000  # the seed for learning rates


class Block(nn.Module):
    """Attention to earlier characters, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.joined = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        heads = self.mixed(F.rms_norm(x, (WIDTH,))).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(F.rms_norm(x, (WIDTH,)))))


class Characters(nn.Module):
    """A decoder-only transformer without biases: int64 (batch, length) to (batch, length, vocabulary)."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next character."""
        x = self.blocks(self.embed(x) + self.place.weight)
        return self.head(F.rms_norm(x, (WIDTH,)))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over all characters."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def options() -> Any:
    """Return the parser of the command line."""
    made = harness.parser(__doc__)
    made.add_argument("--steps", type=harness.at_least(1), default=200, help="batches of a run")
    return made


def bench(asked: Options, path: Path) -> Results:
    """Choose a learning rate for each optimizer, train by every policy, and draw the losses."""
    torch.set_num_threads(1)
    samples = text.load(length=LENGTH)
    job = {"model": "Characters", "width": WIDTH, "heads": HEADS, "layers": LAYERS, "length": LENGTH}
    job |= {"batch_size": BATCH_SIZE, "micro_batches": MICRO_BATCHES, "steps": asked.steps}
    results = Results(path, threads=1, job=job, sweep=[], runs=[])
    train = Training(samples, asked.steps)
    for name, rates in RATES.items():
        sweep = [train(name, rate, "synchronous", SWEEP) for rate in rates]
        results.keep(sweep=sweep)
        best = min(sweep, key=lambda run: run["held_out"])["lr"]
        for policy in POLICIES:
            results.keep(runs=[train(name, best, policy, seed) for seed in range(asked.repeats)])
    harness.show(
        results.content["sweep"], {"optimizer": "{optimizer}", "lr": "{lr:g}", "loss": "{held_out:.3f}"}
    )
    columns = {"optimizer": "{optimizer}", "policy": "{policy}", "lr": "{lr:g}"}
    columns |= {"held-out loss": "{mean:.3f} ({least:.3f}-{most:.3f})"}
    harness.show(rows(results.content["runs"]), columns, left=2)
    save_picture(path.with_suffix(".png"), figure(results.content["runs"]))
    return results


class Training:
    """Trains fresh models on ``samples``; its plan is cut once."""

    def __init__(self, samples: Any, steps: int) -> None:
        self.samples, self.steps, self.vocabulary = samples, steps, samples.describe.num_classes
        example = samples.train.inputs_of(torch.arange(BATCH_SIZE // MICRO_BATCHES))
        profile = penstock.measure(penstock.trace(Characters(self.vocabulary), (example,)), (example,))
        self.plan: Plan = penstock.partition(
            profile, stages=2, ranks=1, micro_batches=MICRO_BATCHES, codec="raw"
        )

    def __call__(self, optimizer: str, lr: float, policy: str, seed: int) -> dict[str, Any]:
        """Train one model; return its facts and losses: of points of the training, and ``held_out``."""
        torch.manual_seed(seed)
        model, make = Characters(self.vocabulary), OPTIMIZERS[optimizer]
        plan = dataclasses.replace(self.plan, **POLICIES[policy])
        pipe = penstock.Pipeline(model, plan, loss=loss, optimizer=lambda named: make(named, lr=lr))
        start, losses = time.monotonic(), list[float]()
        for chosen in torch.randint(len(self.samples.train), (self.steps, BATCH_SIZE)):
            losses.append(pipe.step(*self.batch(self.samples.train, chosen)).loss)
        pipe.drain()
        seconds = time.monotonic() - start
        held_out, targets = self.batch(self.samples.test, torch.arange(min(1024, len(self.samples.test))))
        facts = {"optimizer": optimizer, "lr": lr, "policy": policy, "seed": seed, "seconds": seconds}
        with torch.no_grad():
            found = float(loss(model(held_out), targets))
        pipe.close()
        means = [statistics.mean(losses[at : at + WINDOW]) for at in range(0, self.steps, WINDOW)]
        return facts | {"held_out": found, "losses": means}

    @staticmethod
    def batch(windows: Any, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        return windows.inputs_of(chosen), windows.targets_of(chosen)


def rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean and range of the seeds of each optimizer and policy."""
    found = []
    for optimizer, policy in dict.fromkeys((run["optimizer"], run["policy"]) for run in runs):
        seeds = [run for run in runs if (run["optimizer"], run["policy"]) == (optimizer, policy)]
        values = [run["held_out"] for run in seeds]
        row = {"optimizer": optimizer, "policy": policy, "lr": seeds[0]["lr"]}
        row |= {"mean": statistics.mean(values), "least": min(values), "most": max(values)}
        found.append(row | {"curves": list(zip(*(run["losses"] for run in seeds), strict=True))})
    return found


def figure(runs: Sequence[Mapping[str, Any]]) -> Any:
    """Draw a panel for each optimizer: training losses, mean and range of the seeds of each policy."""
    from matplotlib.figure import Figure  # takes a second to import, and only a drawing needs it

    made = Figure(figsize=(10.0, 4.2), layout="constrained")
    panels = dict(zip(OPTIMIZERS, made.subplots(1, len(OPTIMIZERS), sharey=True), strict=True))
    for row in rows(runs):
        axes, color = panels[row["optimizer"]], COLORS[row["policy"]]
        steps = [WINDOW * (number + 1) for number in range(len(row["curves"]))]
        label = f"{row['policy']}: {row['mean']:.3f} held out"
        axes.plot(steps, [statistics.mean(each) for each in row["curves"]], color=color, label=label)
        low, high = [min(each) for each in row["curves"]], [max(each) for each in row["curves"]]
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
        axes.set_title(f"{row['optimizer']}, learning rate {row['lr']:g}", loc="left")
    for axes in panels.values():
        axes.set_xlabel("step")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    panels["AdamW"].set_ylabel(f"training loss, means of {WINDOW} steps")
    return made


if __name__ == "__main__":
    harness.main(options(), bench)
