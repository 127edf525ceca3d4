"""Names that torch does not promise: every private one that stages and pipeline rely on, with its reason.

A release of torch may change any of them; ``tests/stages/test_torch_private.py`` says what breaks then.
"""

import functools
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counter
from torch.autograd.graph import GradientEdge, Node
from torch.fx import _symbolic_trace
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as _module
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as BatchOrInstanceNorm
from torch.optim import optimizer as _optimizers  # pyright: ignore[reportAttributeAccessIssue]
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils import _pytree as pytree
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype as group_tensors
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_is_leaf,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)
from torch.utils.data._utils import signal_handling as _signal_handling

__all__ = [
    "BatchNorm", "BatchOrInstanceNorm", "TorchDispatchMode", "TreeSpec", "group_tensors", "keystr",
    "preserve_version_counter", "pytree", "tree_flatten", "tree_flatten_with_path", "tree_is_leaf",
    "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten",
]  # fmt: skip

# -- memory: who has the same, and who else holds it ----------------------------------------------------

TensorBase = torch._C.TensorBase
"""Owner of the methods of a tensor; no public name has it."""


def memory_id(tensor: torch.Tensor | torch.UntypedStorage) -> int:
    """Identity of the storage under a tensor; a meta tensor's data_ptr is 0, and two wrappers have one."""
    storage = tensor if isinstance(tensor, torch.UntypedStorage) else tensor.untyped_storage()
    return storage._cdata


def num_storage_holders(storage: torch.UntypedStorage) -> int:
    """Number of tensors and wrappers that hold a storage; Python counts its own wrappers alone."""
    return torch._C._storage_Use_Count(storage._cdata)


def storage_behind(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage of a weak reference, None where nobody holds it any more."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Number of writes to a tensor that autograd counted; in-place checks compare the same number."""
is_view: Callable[[torch.Tensor], bool] = operator.methodcaller("_is_view")
"""Whether autograd takes a tensor for a view."""
is_zero_tensor: Callable[[torch.Tensor], bool] = operator.methodcaller("_is_zerotensor")
"""Whether a tensor is zeros without memory, as forward-mode differentiation makes them."""
values_of: Callable[[torch.Tensor], torch.Tensor] = operator.methodcaller("_values")
"""Values of a sparse tensor as it is; the public name refuses one that is not coalesced."""
is_functorch_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
"""Whether a tensor is a level of ``torch.func``, whose memory is not its own."""


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a view was taken of, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


# -- autograd: the graph of a backward, and what it saved -----------------------------------------------


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return whether the gradient of a tensor has hooks."""
    return bool(tensor._backward_hooks)


gradient_hooks: Callable[[Any], tuple[dict[int, Any], dict[int, Any]]] = operator.attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)
"""The hooks of a leaf that see its gradient, and those behind its addition, in their order."""


def current_node() -> tuple[str, int] | None:
    """Name and number of the node that runs in a backward on this thread, None where none does."""
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr())


def run_engine(
    roots: tuple[torch.Tensor | GradientEdge, ...],
    gradients: tuple[torch.Tensor, ...],
    leaves: tuple[GradientEdge, ...],
    *,
    retain: bool,
) -> None:
    """Run ``torch.autograd.backward`` without its checks of the gradients, which promises held already."""
    Variable._execution_engine.run_backward(
        roots,  # type: ignore[arg-type]
        gradients,
        retain,
        False,
        leaves,
        allow_unreachable=True,
        accumulate_grad=True,
    )


def saved_names(kind: type[Node]) -> list[str]:
    """Names of the tensors that nodes of a kind saved, for ``saved_tensor``."""
    return [name.removeprefix(_SAVED) for name in dir(kind) if name.startswith(_SAVED)]


_SAVED = "_raw_saved_"


def saved_tensor(node: Node, name: str) -> Any:
    """A saved tensor of a node before it is unpacked, which takes hooks; several of them as a tuple."""
    return getattr(node, f"{_SAVED}{name}")


def convolution_backend(node: Any) -> tuple[torch.Tensor, Callable[[torch.Tensor], str]]:
    """The weight of a convolution's node, and a function from its input to the backend of its backward."""
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    found = [getattr(node, f"_saved_{name}") for name in names]
    weight, settings = node._saved_weight, [list(one) if isinstance(one, tuple) else one for one in found]
    return weight, lambda given: str(torch._C._select_conv_backend(given, weight, None, *settings))


# -- modules: what torch.nn registers ---------------------------------------------------------------------

PARAMETERS, BUFFERS = "_parameters", "_buffers"
REGISTERED = (PARAMETERS, BUFFERS, "_modules")
FORWARD_PRE_HOOKS = "_forward_pre_hooks"
FORWARD_HOOKS = ("_forward_hooks", FORWARD_PRE_HOOKS)
HOOKS = (*FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks")
INTERNAL = {*REGISTERED, "_flat_weight_refs"}
"""Attributes that say nothing of their own; a copy of an LSTM makes its references to weights anew."""


def hooks_on_all_modules() -> tuple[tuple[Any, ...], ...]:
    """The hooks that torch calls for every module."""
    return tuple(tuple(getattr(_module, f"_global{name}")) for name in HOOKS)


def optimized_module() -> type[nn.Module] | None:
    """The class of what ``torch.compile`` makes of a module; None while nobody has compiled one."""
    return getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)


def saved_tensors_hooks(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> torch.autograd.graph.saved_tensors_hooks:
    """Return torch's hooks; ``torch.compile`` does not compile ``pack``, which it does around what it leaves
    to eager mode, as an LSTM."""
    if "torch._dynamo" in sys.modules:
        pack = functools.partial(_eager(), pack)
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


@functools.cache
def _eager() -> Callable[..., Any]:
    """Return what calls a function so that ``torch.compile`` leaves it alone; one for all, as torch keeps
    each."""
    disable: Any = torch.compiler.disable
    return disable(lambda call, item: call(item))


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


# -- calls: modes, schemas, marked functions --------------------------------------------------------------


dispatch_mode: Callable[[], TorchDispatchMode | None] = _get_current_dispatch_mode
"""Returns the innermost mode that sees kernels."""


def paused(mode: TorchFunctionMode) -> AbstractContextManager[Any]:
    """A block that ``mode``, if it is the innermost, does not see."""
    return _pop_mode_temporarily() if _get_current_function_mode() is mode else nullcontext()


schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
"""Schema of an operation: its name, and which arguments it writes to."""


def wrapped_functions() -> Iterator[tuple[dict[str, Any], str]]:
    """Globals and name of every function that is marked with ``torch.fx.wrap``."""
    yield from ((frame, name) for (_, name), frame in _symbolic_trace._wrapped_fns_to_patch.items())


# -- optimizers and loaders: what the pipeline relies on --------------------------------------------------

foreach_norm: Callable[[list[torch.Tensor]], Any] = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]
"""Norms of tensors of one device and dtype in one call."""
unscale: Callable[..., None] = torch._amp_foreach_non_finite_check_and_unscale_  # pyright: ignore[reportPrivateImportUsage]
"""GradScaler's kernel: multiplies gradients of one device and dtype, and notes one that is not finite."""
update_scale: Callable[..., torch.Tensor] = torch._amp_update_scale_  # pyright: ignore[reportPrivateImportUsage]
"""GradScaler's rule for the next scale."""
without_torch_functions: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""Context in which no ``__torch_function__`` sees a call."""


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks of its own have a part in the steps of an optimizer."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def has_global_step_hooks() -> bool:
    """Return whether hooks have a part in the steps of all optimizers."""
    return bool(_optimizers._global_optimizer_pre_hooks or _optimizers._global_optimizer_post_hooks)


def buffers_of(module: nn.Module) -> dict[str, Any]:
    """The buffers of a module itself, which may be replaced without a check."""
    return module._buffers


def ignore_worker_deaths(batches: Any) -> None:
    """Have torch's handler of SIGCHLD watch the processes of a DataLoader's iterator no longer."""
    if batches._worker_pids_set:
        _signal_handling._remove_worker_pids(id(batches))  # pyright: ignore[reportPrivateImportUsage]
        batches._worker_pids_set = False
