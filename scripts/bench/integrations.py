"""Race of what other programs send, packed and as it is: torch's pipelines, DistributedDataParallel, FSDP2.

Both sides of a race live in the same processes and take turns, over loopback and shaped links. After the race
their parameters are compared bit for bit: on three ranks and more ours add gradients up in another order than
gloo, so there only the pipeline's are. ``--only`` runs one side, for the peak of its memory."""

import functools
import statistics
from collections.abc import Callable, Mapping
from itertools import cycle, starmap
from pathlib import Path
from typing import Any

import harness
import shaped_links
import torch
import torch.distributed as dist
from harness import Job, Options, Results, alternate, ratio_of_pairs, spread, together
from shaped_links import LOOPBACK, parse_link
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_pipeline import TorchPipeline

import penstock
from penstock.compression.errors import ConfigError
from penstock.compression.names import HOST
from penstock.conf.schema import TrainConfig
from penstock.pipeline.distributed.launcher import init
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.run.losses import cross_entropy as loss
from penstock.pipeline.run.planning import model_name, record
from penstock.pipeline.run.run_folder import RunFolder
from penstock.pipeline.runtime.meter import ResidentMemory
from penstock.stages.plan.plan import Plan
from penstock.stages.units import show_bytes

SIDES = ("plain", "packed")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
COLUMNS: dict[str, Any] = {
    "link": "{link}",
    "host": "{host}",
    "ranks": "{ranks}",
    "plain": "{plain:.3f} s",
    "packed": "{packed:.3f} s",
    "speedup": lambda row: f"{row['speedup']:.2f}x ({spread(row['speedup_of_pairs'])})",
    "bytes": "{ratio:.2f}x",
    "same bits": lambda row: "yes" if row["same"] else "NO",
    "peak": lambda row: show_bytes(max(row["peaks"])),
}


def options() -> Any:
    """Return the parser of the command line."""
    made = harness.parser(
        __doc__, job="model=resnet18 data=fake ranks=2 batch_size=64 micro_batches=8 threads=1"
    )
    listed, add = harness.list_of, made.add_argument
    add("--hosts", type=listed(known=HOSTS), default=list(HOSTS), help=f"of {', '.join(HOSTS)}")
    add("--links", type=listed(lambda text: parse_link(text).name), default=[LOOPBACK, "1Gbit", "100Mbit"],
        help="loopback, or rates of each rank's link to the others")  # fmt: skip
    add(
        "--only", choices=SIDES, help="run one side alone, for the most that it has resident beyond its start"
    )
    add("--steps", type=harness.at_least(1), default=2, help="steps of a run")
    return made


def bench(asked: Options, path: Path) -> Results:
    """Race every host on every link; return the results."""
    if asked.only and len(asked.hosts) > 1:
        raise ConfigError("--only measures the peak of one process, which races one host; name it by --hosts")
    defaults = {"model": "resnet18", "data": "fake", "data.size": 32, "data.drop_last": "true"}
    defaults |= {"ranks": 2, "batch_size": 64, "micro_batches": 8, "threads": 1}
    config = harness.train_config(asked.job, defaults)
    plan = plan_of(config)
    fields = ("ranks", "batch_size", "micro_batches", "seed", "threads")
    facts = {name: getattr(config, name) for name in fields} | {"model": model_name(config)}
    facts |= {name: getattr(asked, name) for name in ("repeats", "steps")} | {"cuts": list(plan.cuts)}
    results = Results(path, job=facts, rows=[])
    with results.folder().private() as folder:
        for link in map(parse_link, asked.links):
            places: dict[str, Any] = {"ranks": config.ranks, "device": link.device}
            with shaped_links.joined(link, ranks=config.ranks) as places["ends"]:
                found = harness.measure_on_ranks(
                    "integrations", folder, asked, config, {"cut": plan}, **places
                )
            results.keep(rows=[row_of(link.name, host, config.ranks, one) for host, one in found.items()])
    harness.show(results.content["rows"], COLUMNS, left=2)
    return results


def plan_of(config: TrainConfig) -> Plan:
    """Cut the model for torch's 1F1B, which takes one stage a rank."""
    profile = record(config, Job(config).samples).measure()
    return partition(
        profile, ranks=config.ranks, cuts=config.cuts, micro_batches=config.micro_batches, codec="raw"
    )


def row_of(link: str, host: str, ranks: int, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a race, or of one side."""
    runs, row = found["runs"], {"link": link, "host": host, "ranks": ranks}
    row |= {side: statistics.median(runs[side]) for side in runs} | {"runs": runs}
    if found["sent"]:
        row["ratio"] = found["raw"] / found["sent"]
    if len(runs) < len(SIDES):
        return row | {"peaks": found["peaks"]}
    if ranks == 2 or host == "pipeline":
        row["same"] = found["same"]
    return row | ratio_of_pairs(runs["plain"], runs["packed"])


# Hosts: each returns what takes a step, the parameters, and who counts what was packed.

Made = tuple[Callable[[Any, Any], object], nn.Module, list[Any]]


def pipeline(job: Job, plan: Plan, *, packed: bool) -> Made:
    """Train by torch's Schedule1F1B."""
    pipe = TorchPipeline(job.model(), plan, loss=loss, optimizer=job.optimizer)
    transfers = [penstock.pack_transfers(pipe.schedule)] if packed else []
    return pipe.step, nn.ModuleList(pipe.parts.values()), transfers


def ddp(job: Job, plan: Plan, *, packed: bool, dtype: torch.dtype) -> Made:
    """Train by DistributedDataParallel."""
    model = DistributedDataParallel(job.model().to(dtype))
    transfers = []
    if packed:
        hook = penstock.ddp_hook()
        model.register_comm_hook(None, hook)
        transfers = [hook]
    return _plain_step(job, model, dtype), model, transfers


def fsdp2(job: Job, plan: Plan, *, packed: bool, dtype: torch.dtype) -> Made:
    """Train by fully_shard, a shard group for each child with parameters."""
    whole: Any = job.model()
    for buffer in whole.buffers():  # a batch norm on a CPU wants one dtype
        buffer.data = buffer.to(dtype) if buffer.is_floating_point() else buffer
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    gather, scatter = penstock.FsdpAllGather(), penstock.FsdpReduceScatter()
    sharded: list[Any] = [child for child in whole.children() if [*child.parameters()]]
    for module in [*sharded, whole]:
        fully_shard(module, mesh=init_device_mesh(HOST, (dist.get_world_size(),)), mp_policy=policy)
        if packed:
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
    return _plain_step(job, whole, dtype), whole, [gather, scatter] if packed else []


def _plain_step(job: Job, model: nn.Module, dtype: torch.dtype) -> Callable[[Any, Any], object]:
    optimizer = job.optimizer([*model.named_parameters()])

    def step(inputs: Any, targets: Any) -> None:
        optimizer.zero_grad()
        own = slice(dist.get_rank(), None, dist.get_world_size())  # each rank takes its part of a batch
        loss(model(inputs[own].to(dtype)).float(), targets[own]).backward()
        optimizer.step()

    return step


HOSTS: dict[str, tuple[Callable[..., Made], dict[str, Any]]] = {
    "pipeline": (pipeline, {}),
    **{f"ddp_{name}": (ddp, {"dtype": dtype}) for name, dtype in DTYPES.items()},
    **{f"fsdp2_{name}": (fsdp2, {"dtype": dtype}) for name, dtype in DTYPES.items()},
}


def rank(folder: RunFolder, asked: Options) -> dict[str, Any]:
    """Race on this rank; return the runs, bytes and comparison of each host."""
    config = folder.read_config()
    world, job = init(deadline=config.deadline), Job(config)
    (plan,), found = harness.load_plans(folder).values(), {}
    resident = ResidentMemory(model_bytes=0)
    resident.begin()
    for host in asked.hosts:
        make, settings = HOSTS[host]
        asked_for = [asked.only] if asked.only else SIDES
        sides = {side: make(job, plan, packed=side == "packed", **settings) for side in asked_for}
        turns = {}
        for side, (step, *_) in sides.items():
            steps = starmap(step, cycle(job.batches()))
            turns[side] = functools.partial(together, functools.partial(next, steps), asked.steps)
        alternate(turns, 1)  # which is not timed
        runs = alternate(turns, asked.repeats)
        trained = zip(*(map(_local, module.parameters()) for _, module, _ in sides.values()), strict=True)
        here = [all(torch.equal(one, other) for one, *others in trained for other in others)]
        counted = [getattr(one, "transfers", one) for _, _, transfers in sides.values() for one in transfers]
        here += [sum(one.bytes_raw for one in counted), sum(one.bytes_sent for one in counted)]
        here += [resident.most()]
        same, raw, sent, peaks = zip(*world.all_gather_json(here), strict=True)
        found[host] = {"runs": runs, "same": all(same), "raw": sum(raw), "sent": sum(sent), "peaks": peaks}
    return found


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


if __name__ == "__main__":
    harness.main(options(), bench, rank=rank)
