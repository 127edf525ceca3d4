"""A model on the meta device: recorded by the shapes of its tensors, before anybody has their values.

What a record must not depend on is refused: values that forward reads, and tensors that no name leads to,
which nobody could give values later."""

import contextlib
import copy
import traceback
from collections.abc import Iterator, Mapping

import torch
from torch import fx, nn

from ...compression.errors import PlanError
from ..device import home_of
from ..meta_watch import META, MetaWatch
from .aliases import overlapping
from .capture.nodes import is_code_of_model, where_of
from .object_snapshot import held_tensors, walk

LOADED = "let it do without them, or load the model whole before it is traced (to_empty, load_state_dict)"


def has_meta(model: nn.Module) -> bool:
    """Return whether some parameter or buffer has no values."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def recorded_on(model: nn.Module) -> torch.device:
    """Return where ``model`` is recorded: the meta device if some of it has no values, else where it is."""
    return META if has_meta(model) else home_of(model)


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose tensors have no memory, registered or not."""
    known: dict[int, torch.Tensor] = {}
    for tensor in held_tensors(model):
        if type(tensor) in (nn.Parameter, torch.Tensor):
            without = known[id(tensor)] = tensor.detach().to("meta")
            if isinstance(tensor, nn.Parameter):
                known[id(tensor)] = nn.Parameter(without, tensor.requires_grad)
    return copy.deepcopy(model, known).to("meta")  # type: ignore[arg-type]


def meta_model(model: nn.Module, autocast: torch.dtype | None) -> nn.Module:
    """A copy of ``model`` that has no values at all, to be recorded.

    Raises: PlanError: it holds what nobody could give values, or shall be cast by autocast."""
    if autocast is not None:
        raise PlanError(
            "a model on the meta device is recorded without autocast, which torch does not have there, "
            f"found autocast={autocast}; make the model in that dtype, or load it whole before it is traced"
        )
    registered: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    registered |= dict(model.named_buffers(remove_duplicate=False))
    first = {id(tensor): name for name, tensor in reversed(registered.items())}
    # Lists of parameters that torch itself keeps, and makes anew as they are set.
    flat = {id(module._flat_weights) for module in model.modules() if isinstance(module, nn.RNNBase)}
    for path, item, _ in walk(model, enters=lambda item: id(item) not in flat):
        path = path.removeprefix(".")
        if isinstance(item, torch.Tensor) and item.is_meta and registered.get(path) is not item:
            known = first.get(id(item))
            remedy = f"read it as {known}" if known else "register it: register_buffer(name, tensor)"
            raise PlanError(
                "a tensor of a model on the meta device is given values by its name, as a parameter or a "
                f"buffer, found {path}, which is neither; {remedy}"
            )
    for name, tensor in registered.items():
        if tensor.is_meta and type(tensor) not in (nn.Parameter, torch.Tensor):
            raise PlanError(
                f"a parameter on the meta device is a plain torch.nn.Parameter, found {name}, a "
                f"{type(tensor).__name__}; load the model whole before it is traced"
            )
    without = {name: tensor for name, tensor in registered.items() if tensor.is_meta}
    for one, other, *_ in overlapping({n: t for n, t in without.items() if first[id(t)] == n}):
        raise PlanError(
            f"{one} and {other} lie in one memory on the meta device, and what is given values would not; "
            f"make them one parameter ({other} = {one})"
        )
    return on_meta(model)


@contextlib.contextmanager
def recording_meta(model: nn.Module) -> Iterator[None]:
    """The block in which a ``meta_model`` is recorded; PlanError with the place that needs values."""
    try:
        with META, MetaWatch():
            yield
    except PlanError:
        raise
    except Exception as error:
        if not needs_values(error):
            raise
        raise without_values(model, error) from error


def needs_values(error: BaseException) -> bool:
    """Return whether torch says that something cannot be done with tensors of the meta device."""
    return "meta" in str(error).lower()


def without_values(model: nn.Module, error: BaseException) -> PlanError:
    """Return the error for a forward that fails because tensors have no values."""
    found = type(model).__name__
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_code_of_model(frame.f_code.co_filename):
            found = f"{type(frame.f_locals.get('self', model)).__name__} ({frame.f_code.co_filename}:{line})"
    message = str(error).partition("\n")[0].split(". ")[0].rstrip(".;!")
    return PlanError(
        f"a model on the meta device is recorded by shapes, and forward of {found} needs values: {message}; "
        f"{LOADED}"
    )


def refuse_valueless(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> None:
    """Raise PlanError for a constant of a record that has no values: the same would be read in every step."""
    for node in graph.nodes:
        tensor = constants.get(str(node.target)) if node.op == "get_attr" else None
        if tensor is not None and tensor.is_meta:
            raise PlanError(
                f"forward reads a tensor of shape {tuple(tensor.shape)} that no call of torch made and no "
                f"name leads to{where_of(node)}, and on the meta device it has no values; {LOADED}"
            )
