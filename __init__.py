"""Penstock trains one network across unequal machines, packs what travels, and keeps every bit.

Names resolve on first use (PEP 562), so that the command line can print its help without loading torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .compression.codec import CODECS as CODECS
    from .compression.codec import LOSSY_CODECS as LOSSY_CODECS
    from .compression.codec import decode as decode
    from .compression.codec import encode as encode
    from .compression.errors import CheckpointError as CheckpointError
    from .compression.errors import CodecError as CodecError
    from .compression.errors import ConfigError as ConfigError
    from .compression.errors import PenstockError as PenstockError
    from .compression.errors import PlanError as PlanError
    from .compression.errors import ScheduleError as ScheduleError
    from .compression.errors import StageError as StageError
    from .compression.errors import TransportError as TransportError
    from .compression.frame import header_bytes as header_bytes
    from .pipeline.checkpoint import load as load
    from .pipeline.checkpoint import newest as newest
    from .pipeline.checkpoint import save as save
    from .pipeline.data.cached import cached as cached
    from .pipeline.data.loader import Loader as Loader
    from .pipeline.distributed.launcher import init as init
    from .pipeline.distributed.threads import in_threads as in_threads
    from .pipeline.integrations.data_parallel import FsdpAllGather as FsdpAllGather
    from .pipeline.integrations.data_parallel import FsdpReduceScatter as FsdpReduceScatter
    from .pipeline.integrations.data_parallel import ddp_hook as ddp_hook
    from .pipeline.integrations.torch_pipelines import offload_stage as offload_stage
    from .pipeline.integrations.torch_pipelines import pack_transfers as pack_transfers
    from .pipeline.network_definition import from_layers as from_layers
    from .pipeline.partition.partition import partition as partition
    from .pipeline.pipeline import Pipeline as Pipeline
    from .pipeline.run.replay import replay as replay
    from .pipeline.runtime.report import Report as Report
    from .stages.memory.byte_budget import MemoryOptions as MemoryOptions
    from .stages.memory.disk import DiskOptions as DiskOptions
    from .stages.memory.offload import offload as offload
    from .stages.plan.cluster import Cluster as Cluster
    from .stages.plan.plan import Plan as Plan
    from .stages.profiling.measure import measure as measure
    from .stages.profiling.network_profile import Profile as Profile
    from .stages.seeds import layer_seed as layer_seed
    from .stages.split_inputs import Split as Split
    from .stages.tracing.capture.call_spec import Constant as Constant
    from .stages.tracing.tracer import LayerGraph as LayerGraph
    from .stages.tracing.tracer import trace as trace

__version__ = "0.1.0"

_HOMES = {
    "CODECS": "compression.codec",
    "LOSSY_CODECS": "compression.codec",
    "decode": "compression.codec",
    "encode": "compression.codec",
    "header_bytes": "compression.frame",
    "PenstockError": "compression.errors",
    "CodecError": "compression.errors",
    "PlanError": "compression.errors",
    "ScheduleError": "compression.errors",
    "TransportError": "compression.errors",
    "ConfigError": "compression.errors",
    "StageError": "compression.errors",
    "CheckpointError": "compression.errors",
    "Constant": "stages.tracing.capture.call_spec",
    "Split": "stages.split_inputs",
    "trace": "stages.tracing.tracer",
    "LayerGraph": "stages.tracing.tracer",
    "measure": "stages.profiling.measure",
    "Profile": "stages.profiling.network_profile",
    "partition": "pipeline.partition.partition",
    "Plan": "stages.plan.plan",
    "Cluster": "stages.plan.cluster",
    "layer_seed": "stages.seeds",
    "from_layers": "pipeline.network_definition",
    "offload_stage": "pipeline.integrations.torch_pipelines",
    "pack_transfers": "pipeline.integrations.torch_pipelines",
    "ddp_hook": "pipeline.integrations.data_parallel",
    "FsdpAllGather": "pipeline.integrations.data_parallel",
    "FsdpReduceScatter": "pipeline.integrations.data_parallel",
    "offload": "stages.memory.offload",
    "MemoryOptions": "stages.memory.byte_budget",
    "DiskOptions": "stages.memory.disk",
    "Pipeline": "pipeline.pipeline",
    "save": "pipeline.checkpoint",
    "load": "pipeline.checkpoint",
    "newest": "pipeline.checkpoint",
    "Loader": "pipeline.data.loader",
    "Report": "pipeline.runtime.report",
    "init": "pipeline.distributed.launcher",
    "in_threads": "pipeline.distributed.threads",
    "replay": "pipeline.run.replay",
    "cached": "pipeline.data.cached",
}

__all__ = list(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import the module that holds ``name`` and keep the result."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
