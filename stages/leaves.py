"""What torch.fx must take as one layer beside torch's own modules: a module that a person compiled.

A compiled piece is a function of its own, which cannot be looked into; the pipeline then is compared with the
plain loop over the same pieces."""

from __future__ import annotations

import contextlib
import inspect
import sys
from typing import Any

import torch
from torch import fx, nn


def is_compiled(module: nn.Module) -> bool:
    """Whether it came from ``torch.compile(module)``, or was compiled in place by ``module.compile()``."""
    dynamo = sys.modules.get("torch._dynamo")  # two seconds to import; who compiled a module has done so
    made = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
    return made or module._compiled_call_impl is not None


def as_written() -> contextlib.AbstractContextManager[Any]:
    """The block in which compiled pieces run as they were written: shapes and identities are the same, and
    none of the few versions that torch keeps of a compiled function is spent on tensors without memory."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def defaults_of(root: nn.Module, num_inputs: int) -> dict[str, Any]:
    """The defaults at which the arguments of forward behind its first ``num_inputs`` stay."""
    parameters = list(inspect.signature(root.forward).parameters.values())
    return {p.name: p.default for p in parameters[num_inputs:] if p.default is not p.empty}


class Tracer(fx.Tracer):
    """The default tracer with the compiled modules of ``model`` as leaves, in any copy of it.

    A copy forgets that a module was compiled in place, and runs it as it was: its structure is the same."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.compiled = {name for name, module in model.named_modules() if is_compiled(module)}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of the module becomes one node."""
        return module_qualified_name in self.compiled or super().is_leaf_module(m, module_qualified_name)
