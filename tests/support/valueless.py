"""Models on the meta device, files with the values of those of the zoo, and what ranks do with both."""

import copy
import ctypes
from pathlib import Path
from typing import Any

import torch
from cases import OPTIMIZERS
from profiles import measured
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import mse_loss
from zoo import build, cross_entropy

import penstock
from penstock.pipeline.run.checkpoints import write_model
from penstock.pipeline.runtime.meter import ResidentMemory
from penstock.stages.safetensors_io import write_tensors


def without_values(model):
    """A copy of ``model`` on the meta device, tied as it is."""
    known = {
        id(t): nn.Parameter(t.detach().to("meta"), t.requires_grad)
        if isinstance(t, nn.Parameter)
        else t.detach().to("meta")
        for t in (*model.parameters(), *model.buffers())
    }
    return copy.deepcopy(model, known)


def saved(model, path):
    """A file with the state_dict of ``model``."""
    save_file({name: t.detach().contiguous().clone() for name, t in model.state_dict().items()}, path)
    return path


def positions(name, tensor):
    """The one buffer of the zoo that no state_dict has."""
    assert name == "positions"
    tensor.copy_(torch.arange(len(tensor)))


def plan_of(model, batches, stages=3, **options):
    """A plan for ``model`` (with or without values), and its random layers."""
    graph, profile = measured(model, batches[0][0].tensor_split(3)[0].clone())
    return penstock.partition(profile, stages=stages, micro_batches=3, **options), graph.train_probe.random


SETTINGS = {"optimizer": OPTIMIZERS["sgd"], "loss": cross_entropy, "clip": 1.0}


def pipeline_of(model, plan, **options):
    """A pipeline with what all tests here share."""
    return penstock.Pipeline(model, plan, **SETTINGS | options)


def rank_values(name, plan, weights):
    """On a rank: the names that have values here."""
    model = without_values(build(name)[0])
    pipe = pipeline_of(model, plan, load_weights=weights, init_weights=positions)
    named = (*model.named_parameters(), *model.named_buffers())
    here = {key for key, tensor in named if not tensor.is_meta}
    pipe.close()
    return here


def deep(width, layers):
    """Linear layers without anything between them that would save much."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def normal(name, tensor):
    tensor.normal_(std=tensor.shape[-1] ** -0.5)


def rank_peak(width, layers, warm, plan, weights):
    """On a rank: the most memory of two steps above that before the pipeline was made, the bytes of its own
    parameters, and those of the whole model."""
    ctypes.CDLL(None).mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD: what is freed goes back to the system
    _steps(8, layers, warm, None)  # what is imported, and what torch and gloo set up, is no part of a model
    before = ResidentMemory(model_bytes=0)
    before.begin()
    own, whole = _steps(width, layers, plan, weights)
    return before.most(), own, whole


def _steps(width, layers, plan, weights):
    with torch.device("meta"):
        model = deep(width, layers)
    values: Any = {"init_weights": normal} if weights is None else {"load_weights": weights}
    pipe = penstock.Pipeline(model, plan, loss=mse_loss, optimizer=OPTIMIZERS["plain"], **values)
    whole = sum(p.nbytes for p in model.parameters())
    own = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    losses = [pipe.step(torch.ones(4, width), torch.zeros(4, width)).loss for _ in range(2)]
    assert min(losses) > 0
    pipe.close_stages()
    return own, whole


def rank_writes(plan, weights, folder, full):
    """On a rank: write a trained model in turn; what refused it, and how many frames came at a time."""
    model, batches = build("gpt_tied")
    pipe = pipeline_of(
        without_values(model), penstock.Plan.load(plan), load_weights=weights, init_weights=positions
    )
    pipe.step(*batches[0])
    state, frames, said = pipe.state_dict()["model"], [], ""
    if pipe.rank == 0:
        write_tensors(Path(folder) / "gathered.safetensors", state)
    gather = pipe.world.gather

    def counted(*args, **how):
        found = gather(*args, **how)
        frames.append(sum(map(len, found or ())))
        return found

    def before():
        if full:
            raise penstock.ConfigError("the disk is full")

    pipe.world.gather = counted
    try:
        write_model(pipe, Path(folder) / "model.safetensors", before=before)
    except penstock.ConfigError as error:
        said = str(error)
    return said, frames
