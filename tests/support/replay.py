"""Asynchronous training in one process, from the papers: what a stream with several versions must equal.

It shares no code with the engine and none with ``stages/``: the version of every micro-batch comes from a
closed form, and one ``functional_call`` runs the whole model with each stage's parameters at theirs.

Order of stage s of S (asynchronous 1F1B, Narayanan et al., SOSP 2019), in half ticks: F of micro-batch m at
2m + s, B at 2m + 2S - 1 - s, and an update behind each B. Before F of m is the B of j if 2j + 2S - 1 - s <
2m + s, that is j < m - (S - 1 - s): the newest weights at F have seen max(0, m - (S - 1 - s)) updates, and
those at B have seen m, on every stage. ``stashed`` takes the former for both, ``latest`` the former in F and
the latter in B, ``vertical_sync`` for both what the first stage takes, max(0, m - (S - 1)).
``double_buffered`` (PipeDream-2BW, ICML 2021): batch t takes the weights after max(0, t - 1) updates.
Prediction (SpecTrain, Chen et al. 2018; PipeOptim, Guan et al. 2023): F of m runs with w - d * step, where
d = m - max(0, m - (S - 1 - s)) and step = lr * momentum for SGD, lr * m_hat / (sqrt(v_hat) + eps) for Adam.
Error feedback: where the optimizer moves a weight by d_t in update t of batches 0, 1, 2, .. since the last
drain, updates 0 and 1 are d_0 and d_1, and each behind them is d_t + (d_t - d_(t-1)).

Running statistics of BatchNorm have no versions. A stage runs its F in ascending order of m and nothing else
writes them, so a replay in ascending order of m writes the same on all stages.
"""

from typing import Any

import torch
from reference import Seeded
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_

POLICIES = ("latest", "stashed", "vertical_sync", "double_buffered")


def version_of(policy, m, *, stage, num_stages, batch=0):
    """Number of its own updates that the weights of ``stage`` have seen in F of micro-batch ``m``."""
    return {
        "latest": max(0, m - (num_stages - 1 - stage)),
        "stashed": max(0, m - (num_stages - 1 - stage)),
        "vertical_sync": max(0, m - (num_stages - 1)),
        "double_buffered": max(0, batch - 1),
    }[policy]


class Replay:
    """The whole model on the versions of its stages.

    Args:    stages: the names of each stage's parameters.
             policy: one of ``POLICIES``.
             optimizer: from (name, parameter) pairs to an optimizer; ``scheduler`` from that to a scheduler.
             clip: largest L2 norm of an update's gradient: of the whole model where the update is a batch's,
             else of each stage.
             random: names of the layers that are seeded, as in ``reference.Seeded``."""

    def __init__(
        self, model, *, stages, policy, loss, optimizer, micro_batches,
        prediction=False, error_feedback=False, clip=None, scheduler=None, random=(), seed=0, weight=len,
    ):  # fmt: skip
        self.model, self.policy, self.loss, self.prediction = model, policy, loss, prediction
        self.micro_batches, self.clip, self.seed, self.weight = micro_batches, clip, seed, weight
        named = dict(model.named_parameters())
        self.stages = [
            _Stage({name: p for name, p in named.items() if name in names}, optimizer, scheduler)
            for names in stages
        ]
        self.runs, self.error_feedback = _Runs(model, random), error_feedback
        self.step = 0
        self._restart()

    def feed(self, inputs, targets):
        """All micro-batches of one batch, each with its forward, backward and update."""
        count = self.micro_batches
        parts = zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
        parts = [(x.clone(), y.clone()) for x, y in parts if len(x)]  # fresh memory, as in any pipeline
        whole = self.policy == "double_buffered"
        total = sum(self.weight(y) for _, y in parts)
        leaves = self._leaves()
        for index, (x, y) in enumerate(parts):
            leaves = leaves if whole else self._leaves()
            share = self.weight(y) / total if whole else 1.0
            self._run(x, y, share, leaves, place=(self.seed, self.step, index))
            self.m += 1
            if not whole:
                self._update(leaves)
        if whole:
            self._update(leaves)
        self.step, self.batch = self.step + 1, self.batch + 1

    def drain(self):
        """Return the events since the last drain; versions are counted from here again.

        Returns: ``losses`` by micro-batch and ``gradients`` by update (name -> tensor or None), in the order
                 of m, and ``state``: name -> the optimizer's state of that parameter."""
        happened: dict[str, Any] = {"losses": self.losses, "gradients": self.gradients}
        happened["state"] = {
            name: dict(stage.optimizer.state.get(p, {}))
            for stage in self.stages
            if stage.optimizer
            for name, p in stage.trained()
        }
        self._restart()
        return happened

    def _restart(self):
        self.m = self.batch = 0
        self.losses, self.gradients = [], []
        for s, stage in enumerate(self.stages):
            stage.restart()
            if self.prediction:  # what comes before the first update: d = m
                lag = len(self.stages) - 1 - s
                stage.predicted = {m: stage.predict(m) for m in range(1, lag + 1)}

    def _leaves(self):
        """Every parameter as this micro-batch's forward sees it, as a leaf of its own."""
        leaves = {}
        for s, stage in enumerate(self.stages):
            place = {"stage": s, "num_stages": len(self.stages), "batch": self.batch}
            values = stage.values[version_of(self.policy, self.m, **place)]
            values = stage.predicted.get(self.m, values)
            leaves |= {n: v.clone().requires_grad_(stage.named[n].requires_grad) for n, v in values.items()}
        return leaves

    def _run(self, x, y, share, leaves, *, place):
        if self.runs.seeded:
            self.runs.seeded.place = place
        used = dict(self.runs.named_parameters())  # a trace leaves out what it does not run
        named = {f"inner.{name}": leaf for name, leaf in leaves.items() if f"inner.{name}" in used}
        value = self.loss(functional_call(self.runs, named, (x,)), y)
        self.losses.append(value.detach())
        if self.policy == "latest":  # what autograd saved of a parameter shows what its stage holds by now
            for stage in self.stages:
                for name, newest in stage.values[self.m].items():
                    leaves[name].data.copy_(newest)
        (value * share).backward()

    def _update(self, leaves):
        for stage in self.stages:
            for name, parameter in stage.named.items():
                parameter.grad = leaves[name].grad
        if self.clip is not None:
            groups = [stage.named.values() for stage in self.stages]
            if self.policy == "double_buffered":
                groups = [self.model.parameters()]
            for group in groups:
                clip_grad_norm_(group, self.clip)
        self.gradients.append({n: p.grad for n, p in self.model.named_parameters()})
        for s, stage in enumerate(self.stages):
            stage.update()
            if self.error_feedback:
                stage.make_up(self.batch)
            lag = len(self.stages) - 1 - s
            if self.prediction and lag:  # the one forward between this update and the next, of F = m + lag
                stage.predicted[self.m + lag] = stage.predict(lag)


class _Stage:
    """The parameters of one stage, their optimizer, and their values after each update since the drain."""

    def __init__(self, named, optimizer, scheduler):
        self.named = named
        self.optimizer = optimizer(list(named.items())) if named else None
        self.scheduler = scheduler(self.optimizer) if scheduler and named else None

    def restart(self):
        self.values, self.predicted, self.moves = [self._copies()], {}, []

    def update(self):
        if self.optimizer:
            self.optimizer.step()
        if self.scheduler:
            self.scheduler.step()
        for parameter in self.named.values():
            parameter.grad = None
        self.values.append(self._copies())

    def trained(self):
        """Names and parameters that the optimizer has."""
        groups = self.optimizer.param_groups if self.optimizer else ()
        there = {id(p) for group in groups for p in group["params"]}
        return [(name, p) for name, p in self.named.items() if id(p) in there]

    @torch.no_grad()
    def make_up(self, number):
        """Move the weights of the newest version on by how much update ``number`` differs from the last."""
        *_, before, after = self.values
        self.moves.append({name: after[name] - before[name] for name, _ in self.trained()})
        if number > 1:
            for name, p in self.trained():
                p += self.moves[-1][name] - self.moves[-2][name]
            self.values[-1] = self._copies()

    def predict(self, times):
        """The values after ``times`` more steps, as far as the optimizer's state tells."""
        values, optimizer = self._copies(), self.optimizer
        if optimizer is None:
            return values
        for group in optimizer.param_groups:
            for name, p in self.named.items():
                state = optimizer.state.get(p)
                if state and any(p is q for q in group["params"]):
                    values[name] = _ahead(values[name], state, group, times)
        return values

    def _copies(self):
        return {name: p.detach().clone() for name, p in self.named.items()}


def _ahead(weight, state, group, times):
    if "momentum_buffer" in state:
        return torch.sub(weight, state["momentum_buffer"], alpha=times * group["lr"])
    (beta1, beta2), count = group["betas"], state["step"].item()
    denominator = state["exp_avg_sq"].sqrt() / (1 - beta2**count) ** 0.5 + group["eps"]
    rate = times * group["lr"] / (1 - beta1**count)
    return torch.addcdiv(weight, state["exp_avg"], denominator, value=-rate)


class _Runs(torch.nn.Module):
    """The model; where it has random layers, run by the interpreter that seeds them."""

    def __init__(self, model, random):
        super().__init__()
        self.seeded = Seeded(model, random) if random else None
        self.inner = self.seeded.module if self.seeded else model

    def forward(self, x):
        return self.seeded.run(x) if self.seeded else self.inner(x)
