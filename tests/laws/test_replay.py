"""The replay of asynchronous training against the published update rules, on a quadratic of two weights.

Two stages of one scalar each: h = a * x on the first, y = b * h on the second, the loss is (y - z)^2. All
numbers are float64; the recurrences are written out from the papers' formulas."""

import pytest
import torch
from reference import plain_loop, same_bits
from replay import Replay, version_of
from torch import nn

LR, MOMENTUM = 0.05, 0.9
DATA = [(1.0, 2.0), (0.5, -1.0), (-1.5, 0.25), (2.0, 1.0), (-0.75, 0.5), (1.25, -0.5), (0.3, 0.9), (1.1, 0.2)]


class Two(nn.Module):
    """b * (a * x), or with ``power`` 2 b * (a * (a * x))."""

    def __init__(self, power=1):
        super().__init__()
        self.power = power
        self.a = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(-0.4, dtype=torch.float64))

    def forward(self, x):
        for _ in range(self.power):
            x = self.a * x
        return self.b * x


def slope(a, b, x, z):
    """The gradient of (b a x - z)^2 in (a, b)."""
    error = 2 * (b * (a * x) - z)
    return error * b * x, error * (a * x)


def played(policy, *, micro_batches=1, momentum=0.0, power=1, drains=(), **settings):
    """(a, b) after the replay of DATA, one micro-batch being one sample."""
    model = Two(power)
    rows = torch.tensor(DATA, dtype=torch.float64)
    batches = [(part[:, 0], part[:, 1]) for part in rows.split(micro_batches)]
    settings = {
        "optimizer": lambda named: torch.optim.SGD(named, lr=LR, momentum=momentum),
        "loss": lambda y, z: (y - z).square().mean(),
    } | settings
    run = Replay(model, stages=[["a"], ["b"]], policy=policy, micro_batches=micro_batches, **settings)
    seen = []
    for number, batch in enumerate(batches, start=1):
        run.feed(*batch)
        if number in (*drains, len(batches)):
            seen.append(run.drain())
    return (model.a.item(), model.b.item()), seen


def close(found, expected):
    return found == pytest.approx(expected, rel=1e-12)


def test_versions_are_those_of_the_papers():
    of = {
        policy: [
            [version_of(policy, m, stage=s, num_stages=3, batch=m // 2) for m in range(8)] for s in range(3)
        ]
        for policy in ("stashed", "vertical_sync", "double_buffered")
    }
    assert of["stashed"] == [[0, 0, 0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7]]
    assert of["vertical_sync"] == [[0, 0, 0, 1, 2, 3, 4, 5]] * 3
    assert of["double_buffered"] == [[0, 0, 0, 0, 1, 1, 2, 2]] * 3


def course(gradient, steps=8):
    """(a, b) behind w_(t+1) = w_t - lr * gradient, where it is told t and all a and b up to t."""
    a, b = [0.7], [-0.4]
    for t in range(steps):
        da, db = gradient(t, a, b)
        a.append(a[t] - LR * da)
        b.append(b[t] - LR * db)
    return a[-1], b[-1]


def mean_of_two(t, a, b):
    last = max(0, t - 1)
    slopes = [slope(a[last], b[last], x, z) for x, z in DATA[2 * t : 2 * t + 2]]
    return [sum(parts) / 2 for parts in zip(*slopes, strict=True)]


def newest_in_the_backward(t, a, b):
    # h = a (a x): the outer factor's gradient is a x, made in the forward; the inner one's is a, read anew
    late, x = a[max(0, t - 1)], DATA[t][0]
    error = 2 * (b[t] * late * late * x - DATA[t][1])
    return error * b[t] * (late * x + a[t] * x), error * late * late * x


# By policy the gradient of an update, here of n = 2 stages: the first is one late.
RULES = {
    # PipeDream: f(w_1 of t - n + 1, .., w_n of t), and with vertical sync f(w of t - n + 1 on all stages)
    "stashed": (lambda t, a, b: slope(a[max(0, t - 1)], b[t], *DATA[t]), {}),
    "vertical_sync": (lambda t, a, b: slope(a[max(0, t - 1)], b[max(0, t - 1)], *DATA[t]), {}),
    # 2BW: f(W(t-1)), the mean over the micro-batches of a batch
    "double_buffered": (mean_of_two, {"micro_batches": 2}),
    "latest": (newest_in_the_backward, {"power": 2}),
}


@pytest.mark.parametrize("policy", RULES)
def test_a_policy_is_the_rule_of_its_paper(policy):
    gradient, settings = RULES[policy]
    found, _ = played(policy, **settings)
    assert close(found, course(gradient, len(DATA) // settings.get("micro_batches", 1)))
    assert policy != "latest" or not close(played("stashed", power=2)[0], found)


def test_error_feedback_is_its_formula():
    # what update t applies, u, and what it applies of update t - 1 anew: u_(t-1) + (u_(t-1) - u_(t-2))
    steps = []

    def gradient(t, a, b):
        steps.append(mean_of_two(t, a, b))
        return steps[t] if t < 2 else tuple(2 * u - v for u, v in zip(steps[t], steps[t - 1], strict=True))

    found, _ = played("double_buffered", micro_batches=2, error_feedback=True)
    assert close(found, course(gradient, len(DATA) // 2))


def test_a_drain_counts_from_zero_again():
    def gradient(t, a, b):
        return slope(a[t if t == 4 else max(0, t - 1)], b[t], *DATA[t])  # 4 is number 0 of its stream

    found, seen = played("stashed", drains=(4,))
    assert close(found, course(gradient))
    assert [len(part["losses"]) for part in seen] == [4, 4] == [len(part["gradients"]) for part in seen]


def test_prediction_is_the_rule_of_spectrain():
    # forward with W(t) - s * lr * v(t-1), here s = 1 on the first stage (once it has a v), 0 on the last
    a, b, va, vb = [0.7], [-0.4], [0.0], [0.0]
    for t, (x, z) in enumerate(DATA):
        late = max(0, t - 1)
        ahead = a[late] - (t - late) * LR * va[late]
        da, db = slope(ahead, b[t], x, z)
        va.append(MOMENTUM * va[t] + da)
        vb.append(MOMENTUM * vb[t] + db)
        a.append(a[t] - LR * va[-1])
        b.append(b[t] - LR * vb[-1])
    assert close(played("stashed", momentum=MOMENTUM, prediction=True)[0], (a[-1], b[-1]))


def test_prediction_is_the_rule_of_pipeoptim_for_adam():
    # forward with W(t) - s * lr * m_hat / (sqrt(v_hat) + eps)
    beta1, beta2, eps, lr = 0.9, 0.999, 1e-8, 0.05  # and torch's default decay of 0.01
    a, b, moments = [0.7], [-0.4], [[(0.0, 0.0)], [(0.0, 0.0)]]

    def step(which, t):
        mean, square = moments[which][t]
        return lr * (mean / (1 - beta1**t)) / ((square / (1 - beta2**t)) ** 0.5 + eps) if t else 0.0

    for t, (x, z) in enumerate(DATA):
        late = max(0, t - 1)
        slopes = slope(a[late] - (t - late) * step(0, late), b[t], x, z)
        for which, (weights, g) in enumerate(zip((a, b), slopes, strict=True)):
            mean, square = moments[which][t]
            moments[which].append((beta1 * mean + (1 - beta1) * g, beta2 * square + (1 - beta2) * g * g))
            weights.append(weights[t] * (1 - lr * 0.01) - step(which, t + 1))
    found, _ = played("stashed", prediction=True, optimizer=lambda named: torch.optim.AdamW(named, lr=lr))
    assert close(found, (a[-1], b[-1]))


@pytest.mark.parametrize("policy", ["stashed", "latest", "vertical_sync"])
def test_one_stage_is_the_plain_loop(policy):
    model, plain = Two(), Two()
    rows = torch.tensor(DATA, dtype=torch.float64)
    batches = [(part[:, 0], part[:, 1]) for part in rows.split(1)]
    same = {
        "loss": lambda y, z: (y - z).square().mean(),
        "optimizer": lambda named: torch.optim.SGD(named, lr=LR, momentum=MOMENTUM, nesterov=True),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7),
        "micro_batches": 1,
        "clip": 0.5,
    }
    run = Replay(model, stages=[["a", "b"]], policy=policy, **same)
    for batch in batches:
        run.feed(*batch)
    list(plain_loop(plain, batches, **same))
    assert same_bits(model.a, plain.a)
    assert same_bits(model.b, plain.b)
