"""Make what the configuration names: samples, model, optimizer, scheduler.

Each of the four groups names its own by ``_target_``, ours and the user's alike, so one way of calling serves
all, and a wrong option is refused with the options that the target takes."""

import contextlib
import difflib
import functools
import inspect
import pkgutil
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...compression.errors import ConfigError, PenstockError
from ...compression.names import AUTO
from ...conf.groups import OF_THE_RUN, OF_TORCH, OURS, choices
from ...conf.schema import MemoryConfig, TrainConfig
from ...stages.memory.byte_budget import MemoryOptions
from ...stages.meta_watch import META
from ..data.samples import Description, Samples, samples_of
from ..data.storage import local_copy
from .early import how_to_name
from .losses import cross_entropy


class ConstructorError(PenstockError):
    """A constructor of other people that raised; the options may be right."""


def is_bare(options: Mapping[str, Any]) -> bool:
    """True if the options of a model name a source of its values, so it is built on the meta device."""
    return bool(options.get("load_weights") or options.get("init_weights"))


def sources(options: Mapping[str, Any], first_values: Path | None = None) -> dict[str, Any]:
    """Return the sources of a model's values as arguments of ``Pipeline``.

    Args:   first_values: where the run has written them, for a model that names no source."""
    init = options.get("init_weights")
    try:
        function = pkgutil.resolve_name(init) if init else None
        return {"load_weights": options.get("load_weights") or first_values, "init_weights": function}
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"model.init_weights={init} cannot be imported ({str(error).splitlines()[0]}); write the dotted "
            "name of a function of (name, tensor)"
        ) from error


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """The block in which modules are made whose parameters have no memory; buffers are what they are made."""
    plain, known = nn.Module.register_parameter, WeakIdKeyDictionary()

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if type(param) is nn.Parameter and not param.is_meta:
            if param not in known:  # one under two names stays one
                known[param] = nn.Parameter(param.detach().to(META), param.requires_grad)
            param = known[param]
        plain(module, name, param)

    nn.Module.register_parameter = register  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain


# What the target of a group is told where it takes an argument of that name.
FACTS = {
    "model": ("describe", "num_classes", "input_shape"),
    "data": (),
    "optimizer": ("params",),
    "scheduler": ("optimizer", "total_steps", "T_max"),
}


def samples(options: Mapping[str, Any], *, batch_size: int | None = None, labelled: bool = False) -> Samples:
    """Return the data that ``data=`` names, as ``Samples`` or as what people have.

    Args:   batch_size: of the run, if there is one; labelled: inputs by name have the labels among them."""
    if local := options.get("local"):
        options = local_copy(options, str(local))
    facts = {"target": str(options["_target_"]), "skips": bool(options.get("skip_broken", False))}
    return samples_of(_call("data", options), batch_size=batch_size, labelled=labelled, **facts)


def model(
    options: Mapping[str, Any], *, describe: Description, seed: int, bare: bool | None = None
) -> nn.Module:
    """Return the network that ``model=`` names, drawn from ``seed`` and told what it asks of the data.

    Args:   bare: without memory for its parameters; None: where the options name a source of its values."""
    torch.manual_seed(seed)
    facts = {"describe": describe, "num_classes": describe.num_classes, "input_shape": describe.input_shape}
    if not describe.num_classes:
        del facts["num_classes"]
        _, given, known = _target("model", options, FACTS["model"])
        takes = known.get("num_classes")
        asks = takes is not None and given.get("num_classes", takes.default) in (None, takes.empty)
        if asks or str(options["_target_"]).startswith(OURS):
            remedy = " or add model.num_classes=NUMBER" if asks else ""
            raise ConfigError(
                f"model._target_={options['_target_']} asks for the number of classes, and the data set does "
                f"not tell it; give it an attribute `classes` (a list of names){remedy}"
            )
    bare = is_bare(options) if bare is None else bare
    with parameters_on_meta() if bare else contextlib.nullcontext():
        network = _call("model", options, **facts)
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"model._target_={options['_target_']} must return a torch module, not {type(network).__name__}"
        )
    return network


def optimizer(
    options: Mapping[str, Any],
) -> Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]:
    """Return what makes a stage's optimizer from its (name, parameter) pairs; tried at once."""

    def make(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return _call("optimizer", options, params=list(named))

    _attempt("optimizer", options, lambda: make([("weight", nn.Parameter(torch.zeros(1)))]))
    return make


def scheduler(
    options: Mapping[str, Any], *, num_steps: int
) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None:
    """Return what makes the scheduler of an optimizer; None for ``scheduler=none``."""
    if "_target_" not in options:
        return None

    def make(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return _call("scheduler", options, optimizer=optimizer, total_steps=num_steps, T_max=num_steps)

    trial = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    _attempt("scheduler", options, lambda: make(trial))
    return make


def loss(options: Mapping[str, Any]) -> Callable[[Any, Any], torch.Tensor]:
    """Return the function of (outputs, targets) that ``loss=`` names; of a class an object."""
    if not options:
        return cross_entropy
    target = _locate("loss", options.get("_target_"))
    is_class = isinstance(target, type)
    try:
        facts = [] if is_class else [*inspect.signature(target).parameters][:2]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"loss._target_={options['_target_']} does not say what it takes; name a Python function of "
            "(outputs, targets), or a class whose objects are called so"
        ) from error
    _, given, _ = _target("loss", options, facts)
    make = functools.partial(target, **instantiate(given, _convert_="all"))
    return _attempt("loss", options, make) if is_class else make


def memory(options: MemoryConfig) -> MemoryOptions:
    """Return how a rank moves what waits in a tier, as ``memory.`` asks."""
    counts = (options.prefetch_layers, options.writeout_layers)
    prefetch, writeout = (None if count == AUTO else count for count in counts)
    return MemoryOptions(prefetch_layers=prefetch, writeout_layers=writeout, host=options.host)


def autocast(name: str | None) -> torch.dtype | None:
    """Return the dtype that ``autocast=`` names."""
    return None if name is None else getattr(torch, name)


def check_targets(config: TrainConfig) -> None:
    """Refuse targets that cannot be imported, or do not take their options, before anything is made."""
    for group, facts in FACTS.items():
        options = getattr(config, group)
        if options and not (group == "scheduler" and "_target_" not in options):
            _target(group, options, facts)
    loss(config.loss)
    optimizer(config.optimizer)


def _call(group: str, options: Mapping[str, Any], **facts: Any) -> Any:
    """Call the group's target with the user's options, and with those facts it takes that were not given."""
    target, given, known = _target(group, options, facts)
    facts = {name: value for name, value in facts.items() if name in known and given.get(name) is None}
    try:
        return target(**instantiate(given, _convert_="all") | facts)
    except PenstockError:
        raise
    except Exception as error:  # a constructor of other people
        odd = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if isinstance(error, TypeError) and odd and odd[1] in given:
            typed = f"{group} has no option {group}.{odd[1]}={given[odd[1]]}"
            raise ConfigError(f"{typed}: {options['_target_']} does not take it") from error
        if group not in ("model", "data"):
            raise
        *_, last = traceback.extract_tb(error.__traceback__)
        reason = " ".join(str(error).split())
        raise ConstructorError(
            f"{group}._target_={options['_target_']} cannot be made: {type(error).__name__}: {reason} "
            f"({last.filename}, line {last.lineno})"
        ) from error


def _target(
    group: str, options: Mapping[str, Any], facts: Collection[str]
) -> tuple[Callable[..., Any], dict[str, Any], Mapping[str, inspect.Parameter]]:
    """Return the group's target, its options, and the arguments it takes by name; ``facts``: known values."""
    target = _locate(group, options.get("_target_"))
    aside = ("_target_", *OF_THE_RUN.get(group, ()))
    given = {name: value for name, value in options.items() if name not in aside}
    known = inspect.signature(target).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in known.values())
    for name in given:
        if name not in known and not takes_all:
            takes = ", ".join(one for one in known if one not in facts) or "none"
            raise ConfigError(f"{group} has no option {group}.{name}={given[name]}; it takes {takes}")
    for name, one in known.items():
        if one.default is one.empty and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            if name not in given and name not in facts:
                raise ConfigError(f"{group}._target_={options['_target_']} needs {group}.{name}=; give it")
    return target, given, known


def _locate(group: str, path: Any) -> Callable[..., Any]:
    if not isinstance(path, str):
        raise ConfigError(f"{group}=own needs {group}._target_=, the dotted name of your class or function")
    try:
        module, _, name = path.rpartition(".")
        return _of_torch(group, name) if module == OF_TORCH.get(group) else pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"{group}._target_={path} cannot be imported ({reason}); {how_to_name(group, path)}"
        ) from error


def _of_torch(group: str, name: str) -> Callable[..., Any]:
    """Return the callable of that name in any case: adam is torch.optim.Adam."""
    module = pkgutil.resolve_name(OF_TORCH[group])
    public = {one.lower(): one for one in dir(module) if one[0] != "_" and callable(getattr(module, one))}
    if spelt := public.get(name.lower()):
        return getattr(module, spelt)
    known = choices(group)
    close = difflib.get_close_matches(name.lower(), [*known, *public], n=1)
    meant = f"did you mean {group}={close[0]}? " if close else ""
    raise ConfigError(
        f"{group}={name} is not known; {meant}{group} is one of {', '.join(known)}, or a name of "
        f"{OF_TORCH[group]}"
    )


def _attempt(group: str, options: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """Return what ``make`` makes; a ConfigError if it refuses the values of the options."""
    try:
        return make()
    except (ValueError, TypeError) as error:
        given = [f"{group}.{name}={value}" for name, value in options.items() if name != "_target_"]
        raise ConfigError(f"{' '.join(given)} is refused: {error}") from error
