"""Inside somebody's mesh the data-parallel axis is theirs: with the hook of the docs, the bits of DDP."""

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import Case, plan_of
from reference import same_bits
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from zoo import build

import penstock
from penstock.pipeline.distributed.process_group import World

PAGE = Path(__file__).resolve().parents[2] / "docs" / "replicas.md"
CASE = Case(model="mlp", cuts=2, micro_batches=3, steps=4)
loss = torch.nn.functional.cross_entropy


def documented(mesh):
    """The code of the docs page."""
    (block,) = re.findall(r"```python\n([^`]*mesh[^`]*)```", PAGE.read_text())
    names: dict[str, Any] = {"mesh": mesh}
    exec(block, names)
    return names["make"]


def ddp_step(model, optimizer, x, y, number):
    """A step of plain DDP, which accumulates over micro-batches and averages with the last of them."""
    optimizer.zero_grad()
    parts = list(zip(x.tensor_split(number), y.tensor_split(number), strict=True))
    for index, (inputs, targets) in enumerate(parts):
        model.require_backward_grad_sync = index == number - 1
        (loss(model(inputs.clone()), targets.clone()) * (len(targets) / len(y))).backward()
    optimizer.step()


def differences(case, plan):
    """On a rank: what of its stage is not what DDP has, step by step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    make, row = documented(mesh), mesh["dp"].get_local_rank()
    model, batches = build(case.model, case.dtype, case.steps)
    plain = DistributedDataParallel(build(case.model, case.dtype)[0], process_group=mesh["dp"].get_group())
    theirs = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    world = World.from_mesh(mesh["pp"])
    pipe = penstock.Pipeline(model, plan, loss=loss, optimizer=make, world=world)
    found, expected = [], dict(plain.module.named_parameters())
    for step, batch in enumerate(batches):
        x, y = (tensor.chunk(2)[row] for tensor in batch)
        pipe.step(x, y)
        ddp_step(plain, theirs, x, y, case.micro_batches)
        for name, parameter in pipe.update.named.items():
            found += [f"step {step} {name}"] * (not same_bits(parameter, expected[name]))
            found += [f"step {step} gradient {name}"] * (not same_bits(parameter.grad, expected[name].grad))
    assert pipe.update.named
    pipe.close()
    world.close()
    return found


def test_rows_of_a_mesh_have_the_bits_of_ddp(ranks):
    assert ranks.run(differences, CASE, plan_of(CASE)[0], ranks=4) == [[]] * 4


def one_after_another(plans):
    """On a rank: the losses of pipelines whose replicas lie on other ranks each."""
    found = []
    for plan in plans:
        model, batches = build("mlp")
        pipe = penstock.Pipeline(
            model, plan, loss=loss, world=World(dist.group.WORLD),
            optimizer=lambda named: torch.optim.SGD(named, lr=0.05),
        )  # fmt: skip
        found.append(pipe.step(*batches[0]).loss)
        pipe.close()
    return found


def test_pipelines_with_replicas_on_other_ranks_follow_each_other(ranks):
    """Torch names a group of some ranks by how many groups each of them has founded."""
    two = {"model": "mlp", "cuts": 2, "micro_batches": 4, "exact": True}
    plans = [plan_of(Case(**two, replicas=replicas))[0] for replicas in ([2, 1], [1, 2], [2, 1])]
    (first, *others), *rest = ranks.run(one_after_another, plans, ranks=3, deadline=10)
    assert others == [first, first]
    assert all(losses == [first] * 3 for losses in rest)
