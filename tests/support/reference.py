"""The plain loop: what every synchronous pipeline must equal, bit for bit. It shares no code with the engine.

Where a model has random layers, the plain loop is run by an interpreter that seeds the same layers."""

import contextlib
import hashlib

import torch
from torch import fx


class Seeded(fx.Interpreter):
    """The model as a default torch.fx trace, its random layers seeded by (seed, step, micro-batch, name)."""

    def __init__(self, model, random):
        super().__init__(fx.symbolic_trace(model))
        self.random, self.place = random, (0, 0, 0)

    def run_node(self, n):
        if n.name in self.random:
            text = "/".join(map(str, (*self.place, n.name)))
            torch.manual_seed(
                int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
            )
        return super().run_node(n)


def plain_loop(
    model,
    batches,
    *,
    loss,
    optimizer,
    micro_batches,
    clip=None,
    scheduler=None,
    random=(),
    seed=0,
    weight=len,
    scaler=None,
    autocast=None,
):
    """Train ``model`` in place; yields (losses of the micro-batches, the step's loss) after every step."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    made = optimizer(list(model.named_parameters()))
    schedule = scheduler(made) if scheduler else None
    seeded = Seeded(model, random) if random else None
    for step, (inputs, targets) in enumerate(batches):
        made.zero_grad()
        parts = list(
            zip(inputs.tensor_split(micro_batches), targets.tensor_split(micro_batches), strict=True)
        )
        parts = [(x.clone(), y.clone()) for x, y in parts if len(x)]  # fresh memory, as in any pipeline
        total = sum(weight(y) for _, y in parts)
        losses, reported = [], 0.0
        for index, (x, y) in enumerate(parts):
            if seeded:
                seeded.place = (seed, step, index)
            with casting(autocast):
                value = loss(seeded.run(x) if seeded else model(x), y)
            share = weight(y) / total
            scaler.scale(value * share).backward()
            losses.append(value.detach())
            reported = reported + value.detach().to(torch.promote_types(value.dtype, torch.float32)) * share
        scaler.unscale_(made)
        gradients = [p.grad for p in model.parameters() if p.grad is not None and scaler.is_enabled()]
        overflow = not all(gradient.isfinite().all() for gradient in gradients)
        norm = None if clip is None else float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        rate = made.param_groups[0]["lr"]
        gradients = {name: p.grad for name, p in model.named_parameters()}
        scaler.step(made)
        scaler.update()
        if schedule and not (overflow and scaler.is_enabled()):
            schedule.step()
        yield {
            "losses": losses,
            "loss": float(reported),
            "gradients": gradients,
            "optimizer": made,
            "scaler": scaler.state_dict(),
            "gradient_norm": norm,
            "learning_rate": rate,
        }


def casting(dtype):
    """Autocast without its cache of weights; None: no cast."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype, cache_enabled=False)


def bits(tensor):
    """A tensor as integers: torch.equal takes -0.0 for 0.0 and no NaN for itself."""
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def same_bits(a, b):
    """True if two tensors (or plain values) have the same bits, shape and dtype."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is type(b) and a == b
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def same_tree(a, b):
    """True if two nests of dicts, lists and tuples hold the same bits."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_tree(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_tree, a, b))
    return same_bits(a, b)
