"""A strategy of Lightning whose module is cut into stages: ``Trainer(strategy="penstock")``."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from ...compression.buffers import new_bytes
from ...compression.codec import decode, encode
from ...compression.errors import ConfigError
from ...compression.names import HOST
from ...stages.device import device_named
from ...stages.torch_private import tree_map
from ..distributed.launcher import init, local_rank
from ..optimizer.optimizers import Named
from ..pipeline import Pipeline

OUTPUTS, WEIGHTS = 1 << 21, 1 << 22  # tags of messages, apart from those of frames


class PenstockStrategy(SingleDeviceStrategy):
    """Trains a LightningModule that is cut into stages, under torchrun on a rank each.

    A batch is a pair of inputs and targets. ``loss(outputs, targets)`` of the module, a mean over the
    samples, takes the place of ``training_step``, and is logged as ``train_loss``. All ranks read the same
    batches, and run ``validation_step`` and ``test_step``, where ``self(inputs)`` is the output of the last
    stage. Loggers, callbacks, schedulers and checkpoints are those of Lightning; rank 0 writes the files.
    Without random layers the weights have the bits of a loop that adds up gradients of micro-batches.

    Args:
        micro_batches: Parts of a batch, which follow each other through the stages.
        clip: Largest L2 norm of all gradients; None: no limit.
        device: Where this rank computes; "cuda" by the number of the rank on its machine.
        pipeline: Arguments of ``Pipeline.of``, such as ``stages``, ``cuts``, ``schedule``, ``codec``,
            ``memory`` and ``autocast``. By default there are as many stages as ranks, and 2 in one process.

    Attributes:
        pipe: The Pipeline of a fit, from its first step to its end; then the module is whole on all ranks.

    Raises:
        ConfigError: The module, or an argument of Trainer, asks for what a pipeline does in another way.
    """

    strategy_name = "penstock"

    def __init__(
        self, *, micro_batches: int = 4, clip: float | None = None, device: str = HOST, **pipeline: Any
    ) -> None:
        super().__init__(device_named(device, local_rank=local_rank()).torch)
        self.options: dict[str, Any] = {"micro_batches": micro_batches, "clip": clip, **pipeline}
        self.pipe: Pipeline | None = None
        self._stage_groups: list[tuple[Optimizer, list[int]]] = []
        self._resumed: Mapping[str, Any] | None = None
        self._state: dict[str, Any] = {}

    # The ranks: all of them decide alike, as they see the same batches, outputs and losses.

    def setup_environment(self) -> None:
        """Join the ranks that torchrun started."""
        super().setup_environment()
        self.world = init(deadline=self.options.get("deadline", 60.0))
        self.global_rank, self.local_rank = self.world.rank, local_rank()
        if self.world.is_alone and not self.options.keys() & {"stages", "cuts", "ranks", "replicas"}:
            self.options["stages"] = 2

    @property
    def is_global_zero(self) -> bool:
        """True on the rank that writes files."""
        return self.world.rank == 0

    def barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all ranks."""
        self.world.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what rank ``src`` has, on every rank."""
        return self.world.all_gather_json(obj if self.world.rank == src else None)[src]

    def _from(self, source: int, tensor: Tensor | None, *, tag: int) -> Tensor:
        """Return the tensor that rank ``source`` has."""
        world = self.world
        frame = encode(tensor.cpu(), "raw") if tensor is not None else None
        length = int(world.broadcast(0 if frame is None else frame.numel(), source))
        if world.rank == source:
            assert tensor is not None
            assert frame is not None
            for work in [world.isend(frame, rank, tag=tag) for rank in range(world.size) if rank != source]:
                work.wait()
            return tensor
        frame = new_bytes(length)
        world.irecv(frame, source, tag=tag).wait()
        found = decode(frame)
        assert found is not None
        return found.to(self.root_device)

    # Training: Lightning's loop calls these in every step.

    def setup(self, trainer: Trainer) -> None:
        """Refuse what does not go together, and do what every strategy does."""
        if trainer.state.fn == TrainerFn.FITTING:
            self._check(trainer, self._module)
        super().setup(trainer)
        for optimizer in self.optimizers:  # stages step, this does not
            optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _check(self, trainer: Trainer, module: LightningModule) -> None:
        loss = getattr(module, "loss", None)
        rules = {
            f"accumulate_grad_batches={trainer.accumulate_grad_batches}": (
                trainer.accumulate_grad_batches == 1, "give micro_batches= of the strategy"
            ),
            f"gradient_clip_val={trainer.gradient_clip_val}": (
                not trainer.gradient_clip_val, "give clip= of the strategy"
            ),
            f"precision={trainer.precision}": (
                trainer.precision == "32-true", "give autocast=torch.bfloat16 of the strategy"
            ),
            "automatic_optimization=False": (module.automatic_optimization, "leave it out"),
            "no loss(outputs, targets) of the module": (callable(loss), "add that method"),
        }  # fmt: skip
        for found, (is_fine, remedy) in rules.items():
            if not is_fine:
                raise ConfigError(f'strategy="penstock" trains stage by stage, found {found}; {remedy}')

    def training_step(self, batch: Any, *_: Any, **__: Any) -> Tensor:
        """Train on one batch; return its loss."""
        inputs, targets = batch
        if self.pipe is None:
            self.pipe = self._cut(inputs)
        for made, places in self._stage_groups:  # schedulers of Lightning move the whole optimizer
            settings = _settings(self.optimizers[0])
            for group, place in zip(made.param_groups, places, strict=True):
                group |= settings[place]
        report = self.pipe.step(inputs, targets)
        loss = torch.tensor(report.loss, device=self.root_device)
        self._module.log("train_loss", loss, prog_bar=True, batch_size=report.num_samples)
        return loss

    def backward(self, closure_loss: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the loss: a step of the pipeline has gone back already."""
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *_: Any, **__: Any) -> Any:
        """Run a step of the pipeline, which updates."""
        return closure()

    def _cut(self, inputs: Any) -> Pipeline:
        (whole,), self._stage_groups = self.optimizers, []
        known = inspect.signature(type(whole)).parameters
        settings = {name: value for name, value in whole.defaults.items() if name in known}
        place = {id(p): n for n, group in enumerate(whole.param_groups) for p in group["params"]}

        def optimizer(named: Named) -> Optimizer:
            places = sorted({place[id(p)] for _, p in named if id(p) in place})
            groups: list[dict[str, Any]] = []
            for number in places:
                mine = [p for _, p in named if place.get(id(p)) == number]
                groups.append(whole.param_groups[number] | {"params": mine})
            made = type(whole)(groups, **settings)
            self._stage_groups.append((made, places))
            return made

        module: Any = self._module
        number = self.options["micro_batches"]
        given = inputs if isinstance(inputs, tuple | dict) else (inputs,)
        example = tree_map(lambda x: x.tensor_split(number)[0] if isinstance(x, Tensor) else x, given)
        options: dict[str, Any] = {"seed": int(os.environ.get("PL_GLOBAL_SEED", 0)), **self.options}
        pipe = Pipeline.of(
            module, example, loss=module.loss, optimizer=optimizer, world=self.world, **options
        )
        if self._resumed is not None:
            pipe.load_state_dict({"model": self._module.state_dict(), **self._resumed})
            self._resumed = None
        return pipe

    # Tests: ``forward`` of the module runs the stages, and every rank has the outputs.

    def validation_step(self, *arguments: Any, **named: Any) -> Any:
        """Run ``validation_step`` of the module."""
        with self._running_stages():
            return super().validation_step(*arguments, **named)

    def test_step(self, *arguments: Any, **named: Any) -> Any:
        """Run ``test_step`` of the module."""
        with self._running_stages():
            return super().test_step(*arguments, **named)

    @contextlib.contextmanager
    def _running_stages(self, runs: bool = True) -> Iterator[None]:
        own = vars(self._module)
        before = own.pop("forward", None)
        if runs and self.pipe is not None:
            own["forward"] = self._outputs
        try:
            yield
        finally:
            own.pop("forward", None)
            own |= {} if before is None else {"forward": before}

    def _outputs(self, *arguments: Any, **named: Any) -> Tensor:
        assert self.pipe is not None
        with self._running_stages(False):  # the pipeline looks whether the module is as it was
            outputs, source = self.pipe.evaluate(named or arguments), 0
        if not self.world.is_alone:
            source = self.pipe.plan.owner(-1)
        if outputs is not None and not isinstance(outputs, Tensor):
            raise ConfigError(
                f"a module in stages returns a tensor, found a {type(outputs).__name__}; return one, or test "
                "the trained weights in a Trainer without strategy="
            )
        return self._from(source, outputs, tag=OUTPUTS)

    # Checkpoints: the module's own state, and in the place of the optimizer's that of all stages.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the module; complete on rank 0."""
        if self.pipe is None:
            return super().lightning_module_state_dict()
        self._state = self.pipe.state_dict()
        return self._state.pop("model")

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of all stages' optimizers, by names of parameters; complete on rank 0."""
        return self._state | {"settings": _settings(optimizer)}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep what the first step loads."""
        (state,) = checkpoint["optimizer_states"]
        if not {"optimizer", "step", "settings"} <= state.keys():
            raise ConfigError(
                'strategy="penstock" goes on from what it saved, found a checkpoint of another strategy; '
                "load its weights by load_from_checkpoint, and train anew"
            )
        self._resumed = {name: value for name, value in state.items() if name != "settings"}
        for group, settings in zip(self.optimizers[0].param_groups, state["settings"], strict=True):
            group |= settings

    def on_exception(self, exception: BaseException) -> None:
        """Let go of the ranks, of which one may have ended; this one keeps what its stages hold."""
        super().on_exception(exception)
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def teardown(self) -> None:
        """Give all ranks the whole trained module."""
        if self.pipe is not None:
            state = self.pipe.state_dict()["model"]
            self.pipe.close()
            self.pipe = None
            if not self.world.is_alone:
                whole = self._module.state_dict()
                found = {name: self._from(0, state.get(name), tag=WEIGHTS) for name in whole}
                self._module.load_state_dict(found)
        super().teardown()


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of each group of parameters its learning rate and what else there is."""
    return [
        {name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


PenstockStrategy.register_strategies(StrategyRegistry)
