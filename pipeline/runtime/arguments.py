"""Refusals of Pipeline before anything runs: each a PlanError with rule, finding and remedy."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...compression.errors import PlanError
from ...compression.names import AUTO, LOSSY
from ...stages.memory.byte_budget import MemoryOptions
from ...stages.memory.disk import DiskOptions
from ...stages.plan.plan import Plan
from ...stages.plan.validation import STREAM
from ...stages.stage.value_routing import Route
from ...stages.tracing.dataflow import Probe
from ...stages.tracing.tracer import LayerGraph, fingerprint
from ..distributed.process_group import World, check_own
from ..optimizer.scale import Scale, Scaler
from ..optimizer.update import SCOPES, Named
from .batches import Weight


def check_gradients() -> None:
    """Training records gradients, so they must not be switched off."""
    if not torch.is_grad_enabled():
        raise PlanError("training needs gradients, and they are switched off here; leave torch.no_grad()")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The arguments of ``Pipeline``, which says what they mean, but for model, plan and where it runs."""

    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Named], Optimizer]
    scheduler: Callable[[Optimizer], LRScheduler] | None
    clip: float | None
    clip_scope: str
    scaler: Scaler
    autocast: torch.dtype | None
    weight: Weight
    seed: int
    deadline: float
    detect_anomaly: bool
    memory: MemoryOptions
    disk: DiskOptions

    def compared(self) -> dict[str, Any]:
        """Return what every rank must give alike; optimizer and scheduler are compared by what they make."""
        apart = ("optimizer", "scheduler", "deadline", "memory", "disk")
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name not in apart}

    @property
    def checks_gradients(self) -> bool:
        """True if a NaN in a gradient is a mistake: without a loss scale that looks for overflows itself."""
        return self.autocast is not torch.float16 and not Scale(self.scaler).checks


def check_options(model: object, plan: object, options: Options) -> None:
    """Refuse what a person may have passed to Pipeline by mistake."""
    loss, optimizer, scheduler, clip = options.loss, options.optimizer, options.scheduler, options.clip
    if not isinstance(model, nn.Module) or not isinstance(plan, Plan | None):
        raise PlanError(
            f"Pipeline takes a torch module and a Plan, found {type(model).__name__} and "
            f"{type(plan).__name__}"
        )
    if isinstance(optimizer, Optimizer) or not callable(optimizer):
        raise PlanError(
            "optimizer is a function of (name, parameter) pairs, called once per stage, found "
            f"{type(optimizer).__name__}; give lambda named: torch.optim.SGD(named, lr=0.1)"
        )
    if clip is not None and not (isinstance(clip, int | float) and clip > 0):
        raise PlanError(f"clip is a largest norm above 0, found {clip}; give None for no clipping")
    if options.autocast is not None and not isinstance(options.autocast, torch.dtype):
        raise PlanError(
            f"autocast is a dtype such as torch.bfloat16, found {options.autocast}; give None for no cast"
        )
    if not isinstance(options.deadline, int | float) or not options.deadline > 0:
        raise PlanError(f"deadline is a number of seconds above 0, found {options.deadline!r}")
    if not callable(loss) or isinstance(loss, type):
        what = f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss)
        raise PlanError(
            f"loss is a function of (outputs, targets), found {what}; give torch.nn.CrossEntropyLoss() or a "
            "function"
        )
    if scheduler is not None and not callable(scheduler):
        raise PlanError(
            "scheduler is a function of an optimizer, called once per stage, found "
            f"{type(scheduler).__name__}; give lambda optimizer: StepLR(optimizer, 10)"
        )
    if options.weight not in (None, "summed") and not callable(options.weight):
        raise PlanError(
            f"weight is a function of targets or 'summed', found {options.weight!r}; None is their number"
        )
    if not isinstance(options.seed, int) or isinstance(options.seed, bool):
        raise PlanError(f"seed is an integer, found {options.seed!r}")
    if not isinstance(options.detect_anomaly, bool):
        raise PlanError(f"detect_anomaly is True or False, found {options.detect_anomaly!r}")


def explain_errors(what: str, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``make``, whose errors name ``what`` it makes; ``make_optimizer`` explains a ValueError."""

    def call(given: Any) -> Any:
        try:
            return make(given)
        except Exception as error:
            if isinstance(error, PlanError) or (what == "optimizer" and isinstance(error, ValueError)):
                raise
            rule = f"the {what} of a stage cannot be made"
            raise PlanError(f"{rule}: {type(error).__name__}: {error}") from error

    return call


def check_update(model: nn.Module, plan: Plan, *, clip: object, scope: str, scaler: object) -> None:
    """Refuse an update of the weights that the schedule or the weights of ``plan`` rule out."""
    if scope not in SCOPES:
        raise PlanError(f"clip_scope is one of {', '.join(SCOPES)}, found {scope!r}; choose one of these")
    if clip is not None and scope == "global" and plan.schedule == STREAM:
        raise PlanError(
            f"with {STREAM} there is no moment at which all stages hold the same step; take "
            "clip_scope=stage, the norm over each stage's gradients, or clip=None"
        )
    if clip is not None and scope == "stage" and plan.sharded and max(plan.replicas) > 1:
        raise PlanError(
            "where each replica updates some parameters none has all gradients of its stage, found "
            "clip_scope=stage; take clip_scope=global, or sharded=False with parameters on the device"
        )
    _check_scaler(model, plan, scaler)


def _sparse(model: nn.Module) -> Iterator[str]:
    """Yield the names of modules whose gradients are sparse."""
    return (name for name, module in model.named_modules() if getattr(module, "sparse", False) is True)


def check_momentum(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """No state of a training can hold the momentum of sparse gradients, which is sparse."""
    groups = [group for made in optimizers for group in made.param_groups if group.get("momentum")]
    moved = {id(parameter) for group in groups for parameter in group["params"]}
    sparse, modules = [*_sparse(model)], dict(model.named_modules())
    others = (module for name, module in modules.items() if name not in sparse)
    dense = {id(p) for module in others for p in module.parameters(recurse=False)}  # also what is tied to it
    for name in sparse:
        if any(id(p) in moved - dense for p in modules[name].parameters(recurse=False)):
            raise PlanError(
                f"a momentum is kept of dense gradients, and {name} gives sparse ones; make it with "
                "sparse=False, or give its parameters a group without momentum"
            )


def _check_scaler(model: nn.Module, plan: Plan, scaler: object) -> None:
    if scaler is None or (isinstance(scaler, GradScaler) and not scaler.is_enabled()):
        return
    number = isinstance(scaler, int | float) and not isinstance(scaler, bool) and 0 < scaler < math.inf
    if not isinstance(scaler, GradScaler) and not number:
        raise PlanError(
            f"scaler is a torch.amp.GradScaler, or a number above 0 that stays, found {scaler!r}; give None "
            "for no loss scale"
        )
    if plan.schedule == STREAM and not number:
        raise PlanError(
            f"with {STREAM} there is no moment at which all stages hold the same step, to skip it or to move "
            "its loss scale; give scaler a number, such as 1024.0"
        )
    if sparse := next(_sparse(model), ""):
        raise PlanError(
            f"a loss scale is taken off dense gradients, and {sparse} gives sparse ones; make it with "
            "sparse=False, or give scaler=None"
        )
    trained = [(name, p.dtype) for name, p in model.named_parameters() if p.requires_grad]
    if half := next((name for name, dtype in trained if dtype == torch.float16), ""):
        raise PlanError(
            f"a loss scale cannot be taken off gradients of float16 without losing them, and {half} is "
            "float16; keep the parameters in float32 and give autocast=torch.float16"
        )
    if odd := next((name for name, dtype in trained if dtype.is_complex), ""):
        raise PlanError(
            f"torch takes a loss scale off real gradients only, and {odd} is complex; give scaler=None"
        )


def check_plan(plan: Plan, model: nn.Module, world: World) -> None:
    """A group of ranks has as many as the plan, each with a model of its own, which the plan was made for."""
    if not world.is_alone and world.size != plan.num_ranks:
        raise PlanError(
            f"the plan is made for {plan.num_ranks} ranks, {world.size} were started; start as many, "
            "or plan again"
        )
    check_own(world.group, model)
    if plan.fingerprint != fingerprint(model):
        raise PlanError(
            "a plan belongs to the model it was made for, and this model has other parameters or "
            "buffers; plan again"
        )


def check_codecs(plan: Plan, records: Sequence[Probe], routed: Sequence[Sequence[Route]]) -> None:
    """A codec is named for what its stage packs, and not for a value that goes on in the frame it came in;
    under "auto" a lossless one is only a start, and no mistake."""
    values, routes = records[0].values, routed[0]
    for (name, way, stage), codec in plan.named_codecs.items():
        if plan.codec == AUTO and codec not in LOSSY:
            continue
        sent = {n for n, _ in routes[stage].sends} - routes[stage].forwards
        back = {n for n, _ in routes[stage].receives if values[n].requires_grad}
        packed = [values[n].name for n in sorted(sent if way == "F" else back)]
        if name not in packed:
            what, known = "values" if way == "F" else "gradients", ", ".join(packed) or "none"
            raise PlanError(
                f"a stage names codecs for the {what} that it packs, found {name}={codec} for stage {stage}, "
                f"which packs {known}; name one of these, or leave it out"
            )


def check_versions_of(state: Mapping[str, Any], plan: Plan) -> None:
    """A state of asynchronous training goes on only where micro-batches see the same versions."""

    def text(versions: object) -> str:
        if versions is None:
            return "a synchronous schedule"
        known = {"schedule", "weights", "prediction", "cuts"}
        if not isinstance(versions, Mapping) or not known <= set(versions):
            return "no known versions"
        predicted = ", prediction=true" if versions["prediction"] else ""
        predicted += ", error_feedback=true" if versions.get("error_feedback") else ""
        cuts = ",".join(map(str, versions["cuts"])) if isinstance(versions["cuts"], list | tuple) else "?"
        return f"schedule={versions['schedule']} weights={versions['weights']}{predicted} cuts=[{cuts}]"

    ours, theirs = plan.versions, state.get("versions")
    if ours != theirs:
        raise PlanError(
            f"a state goes on with the schedule, weights and cuts that it was made with, {text(theirs)}, "
            f"found {text(ours)}; plan alike, or load only its model, before the Pipeline"
        )


def check_written(plan: Plan, model: nn.Module, graph: LayerGraph) -> None:
    """A parameter to which forwards write is as each left it, in one version, when the next one reads it."""
    written = next((name for name, _ in model.named_parameters() if name in graph.written), "")
    if written and plan.streams:
        raise PlanError(
            f"a forward writes to {written}, of which {plan.schedule} keeps versions; take a schedule whose "
            "steps end, or make it a buffer"
        )
    if written and any(stage.recompute for stage in plan.stages):
        raise PlanError(
            f"a forward writes to {written}, and one that runs again would do so twice; take "
            "recompute=false, or make it a buffer"
        )


def check_layers(plan: Plan, graph: LayerGraph) -> None:
    """The model has the layers that the plan spreads over stages."""
    planned = [layer for stage in plan.stages for layer in stage.layers]
    for number, (ours, theirs) in enumerate(zip_longest(graph.layers, planned)):
        if ours != theirs:
            raise PlanError(
                f"a plan belongs to the model it was made for: layer {number} is {ours} in the model, "
                f"{theirs} in the plan; plan again"
            )
