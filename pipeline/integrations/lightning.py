"""A strategy of Lightning whose module is cut into stages: ``Trainer(strategy="penstock")``."""

import contextlib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from ...compression.buffers import new_bytes
from ...compression.codec import decode, encode
from ...compression.errors import ConfigError, PlanError
from ...compression.names import HOST
from ...stages.device import device_named, is_gpu
from ...stages.plan.validation import streams
from ...stages.torch_private import BatchNorm, tree_map
from ..distributed.launcher import init, local_rank
from ..distributed.process_group import World
from ..optimizer.optimizers import Named, settings_of
from ..pipeline import Pipeline, check_settings

OUTPUTS, WEIGHTS = 1 << 21, 1 << 22  # tags of messages, apart from those of frames
DEADLINE = 600.0  # seconds that ranks may wait while rank 0 writes a checkpoint
UNUSED = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
)


class PenstockStrategy(SingleDeviceStrategy):
    """Trains a LightningModule that is cut into stages, under torchrun on a rank each.

    A batch is a pair of inputs and targets. ``loss(outputs, targets)`` of the module, a mean over the
    samples, takes the place of ``training_step``, and is logged as ``train_loss``. All ranks read the same
    batches, and run ``validation_step`` and ``test_step``, where ``self(inputs)`` is the output of the last
    stage. Loggers, schedulers and checkpoints are those of Lightning; rank 0 writes the files. Without random
    layers the weights have the bits of a loop that adds up gradients of micro-batches.

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
        TypeError: ``Pipeline.of`` does not take an argument.
    """

    strategy_name = "penstock"

    def __init__(
        self, *, micro_batches: int = 4, clip: float | None = None, device: str = HOST, **pipeline: Any
    ) -> None:
        super().__init__(device_named(device, local_rank=local_rank()).torch)
        self.options: dict[str, Any] = {"micro_batches": micro_batches, "clip": clip, "deadline": DEADLINE}
        self.options |= pipeline
        check_settings(self.options)
        self.global_rank, self.local_rank = int(os.environ.get("RANK", "0")), local_rank()
        self.world = World()
        self.pipe: Pipeline | None = None
        self._stage_groups: list[tuple[dict[str, Any], int]] = []
        self._resumed: Mapping[str, Any] | None = None
        self._state: dict[str, Any] = {}
        self._hooks: list[Any] = []

    # The ranks: all of them decide alike, as they see the same batches, outputs and losses.

    def setup_environment(self) -> None:
        """Join the ranks that torchrun started."""
        if is_gpu(self.root_device) == isinstance(self.accelerator, CPUAccelerator):
            raise ConfigError(
                f"a Trainer and its strategy compute on one device, found {type(self.accelerator).__name__} "
                f"and device={self.root_device}; give accelerator= and device= alike"
            )
        super().setup_environment()
        self.world = init(deadline=self.options["deadline"])
        if self.world.is_alone and not self.options.keys() & {"stages", "cuts", "ranks", "replicas"}:
            self.options["stages"] = 2

    @property
    def is_global_zero(self) -> bool:
        """True on the rank that writes files."""
        return self.global_rank == 0

    def barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all ranks."""
        self.world.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what rank ``src`` has, on every rank."""
        return self.world.all_gather_json(obj if self.world.rank == src else None)[src]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any, decide so."""
        found = [row[0] for row in self.world.all_gather([decision])]
        return bool(min(found) if all else max(found))

    def _tensor_of(self, source: int, tensor: Tensor | None, *, tag: int) -> Tensor:
        """Return the tensor that rank ``source`` has."""
        world, frame = self.world, None
        if world.rank == source and tensor is not None:
            frame = encode(tensor.cpu(), "raw")
        length = int(world.broadcast(0 if frame is None else frame.numel(), source))
        if tensor is not None and frame is not None:
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
        is_fit = trainer.state.fn == TrainerFn.FITTING
        if is_fit:
            self._check(trainer, self._module)
            self._state, self._resumed = {}, None
        for metric in cast("Iterable[Any]", self._module.modules()):
            if hasattr(metric, "distributed_available_fn"):  # all ranks see the same samples
                metric.distributed_available_fn = _is_distributed
        super().setup(trainer)
        trained = {id(p) for made in self.optimizers for group in made.param_groups for p in group["params"]}
        if is_fit and not trained & {id(p) for p in self._module.parameters()}:
            raise ConfigError(
                "configure_optimizers returns an optimizer of the module's parameters, found none; return one"
            )
        for optimizer in self.optimizers:  # stages step, this does not
            optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _check(self, trainer: Any, module: LightningModule) -> None:
        overridden = [name for name in UNUSED if is_overridden(name, module)]
        averages = any(isinstance(one, WeightAveraging) for one in trainer.callbacks)
        smooths = any(isinstance(one, StochasticWeightAveraging) for one in trainer.callbacks)
        devices = getattr(trainer._accelerator_connector, "_devices_flag", 1)
        rules = {
            f"gradient_clip_val={trainer.gradient_clip_val}": (
                not trainer.gradient_clip_val, "give clip= of the strategy, the norm of all gradients"
            ),
            f"precision={trainer.precision}": (
                trainer.precision == "32-true", "give autocast=torch.bfloat16 of the strategy"
            ),
            "automatic_optimization=False": (module.automatic_optimization, "leave it out"),
            "no loss(outputs, targets) of the module": (
                callable(getattr(module, "loss", None)), "add that method"
            ),
            f"{', '.join(overridden)} of the module": (not overridden, "leave it out"),
            "a schedule that has gradients in flight between steps (async_1f1b, weights=double_buffered)": (
                not streams(self.options.get("schedule", ""), self.options.get("weights", "latest")),
                "choose 1f1b and weights=latest",
            ),
            "WeightAveraging on several ranks": (
                self.world.is_alone or not averages, "leave it out, or train in one process"
            ),
            "StochasticWeightAveraging of a model with batch norms": (
                not (smooths and any(isinstance(one, BatchNorm) for one in module.modules())), "leave it out"
            ),
            f"devices={devices}": (
                not isinstance(devices, int) or devices in (-1, 1, self.world.size),
                "start a rank for each by torchrun",
            ),
        }  # fmt: skip
        for found, (is_fine, remedy) in rules.items():
            if not is_fine:
                raise ConfigError(f'strategy="penstock" trains stage by stage, found {found}; {remedy}')

    def training_step(self, batch: Any, *_: Any, **__: Any) -> Tensor:
        """Train on one batch; return its loss."""
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            raise ConfigError(
                f'a batch of strategy="penstock" is a pair of inputs and targets, found a '
                f"{type(batch).__name__}; have the data set return (inputs, targets)"
            )
        inputs, targets = batch
        inputs = tuple(inputs) if isinstance(inputs, list) else inputs  # a loader makes lists of tuples
        trainer = self._module.trainer
        if (number := trainer.accumulate_grad_batches) != 1:
            raise ConfigError(
                f'strategy="penstock" updates after every batch, found accumulate_grad_batches={number}; '
                "give micro_batches= of the strategy"
            )
        try:
            return self._train(inputs, targets)
        except PlanError as error:
            if "_trainer" not in str(error):
                raise
            raise ConfigError(
                'strategy="penstock" records forward once, found one that reads its trainer, as self.log and '
                "self.current_epoch do; do that in a hook, such as on_train_batch_end"
            ) from error

    def _train(self, inputs: Any, targets: Any) -> Tensor:
        if self.pipe is None:
            self.pipe = self._cut(inputs)
        groups = self.optimizers[0].param_groups  # which schedulers of Lightning move
        if len(groups) != self._num_groups:
            raise ConfigError(
                f"stages train the groups of parameters that there were at the first step, "
                f"{self._num_groups}, found {len(groups)}; make all of them in configure_optimizers"
            )
        for group, number in self._stage_groups:
            group |= settings_of(groups[number])
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
        module, (whole,) = self._module, self.optimizers
        self._num_groups = len(whole.param_groups)
        known = inspect.signature(type(whole)).parameters
        defaults = {name: value for name, value in whole.defaults.items() if name in known}
        numbers = {id(p): n for n, group in enumerate(whole.param_groups) for p in group["params"]}
        number_of = {name: numbers.get(id(p), -1) for name, p in module.named_parameters()}

        def optimizer(named: Named) -> Optimizer:
            groups: dict[int, list[nn.Parameter]] = {}
            for name, parameter in named:  # one of another name is tried alone
                groups.setdefault(number_of.get(name, 0), []).append(parameter)
            groups.pop(-1, None)  # what the optimizer does not have
            made = [settings_of(whole.param_groups[n]) | {"params": groups[n]} for n in sorted(groups)]
            return type(whole)(made, **defaults)

        number = self.options["micro_batches"]
        given = inputs if isinstance(inputs, tuple | dict) else (inputs,)
        example = tree_map(lambda x: x.tensor_split(number)[0] if isinstance(x, Tensor) else x, given)
        options: dict[str, Any] = {"seed": int(os.environ.get("PL_GLOBAL_SEED", "0")), **self.options}
        loss: Any = module.loss
        trainer, module._trainer = module._trainer, None  # whoever looks at the module would walk through it
        try:
            pipe = Pipeline.of(module, example, loss=loss, optimizer=optimizer, world=self.world, **options)
        finally:
            module._trainer = trainer
        made = [group for one in pipe.update.optimizers.values() for group in one.param_groups]
        self._stage_groups = [(group, numbers[id(group["params"][0])]) for group in made if group["params"]]
        if self._resumed is not None:
            pipe.load_state_dict({"model": module.state_dict(), **self._resumed})
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
    def _running_stages(self) -> Iterator[None]:
        self._replace_forward()
        try:
            yield
        finally:
            self._restore_forward()

    def _replace_forward(self) -> None:
        if self.pipe is None:
            return
        module: Any = self._module
        module.forward = self._outputs
        for name, child in module.named_modules() if not self.world.is_alone else ():
            if child is not module and next(child.parameters(recurse=False), None) is not None:
                self._hooks.append(child.register_forward_pre_hook(_refusing(name)))

    def _restore_forward(self) -> None:
        vars(self._module).pop("forward", None)
        while self._hooks:
            self._hooks.pop().remove()

    def _outputs(self, *arguments: Any, **named: Any) -> Tensor:
        assert self.pipe is not None
        self._restore_forward()  # the pipeline looks whether the module is as it was
        try:
            if named:
                named = dict(inspect.signature(self._module.forward).bind(*arguments, **named).arguments)
            outputs = self.pipe.evaluate(named or arguments)
        finally:
            self._replace_forward()
        kind = None if outputs is None or isinstance(outputs, Tensor) else type(outputs).__name__
        if found := next(filter(None, self.world.all_gather_json(kind)), None):
            raise ConfigError(
                f"a module in stages returns a tensor, found a {found}; return one, or test the trained "
                "weights in a Trainer without strategy="
            )
        source = 0 if self.world.is_alone else self.pipe.plan.owner(-1)
        return self._tensor_of(source, outputs, tag=OUTPUTS)

    # Checkpoints: the module's own state, and in the place of the optimizer's that of all stages.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the module; complete on rank 0."""
        if self.pipe is None:
            return super().lightning_module_state_dict()
        self._state = self.pipe.state_dict()
        return self._state.pop("model")

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of all stages' optimizers, by names of parameters; complete on rank 0."""
        return self._state | {"settings": [settings_of(group) for group in optimizer.param_groups]}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load into the whole module, which is cut anew."""
        self._close()
        super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep what the first step loads."""
        state, *others = checkpoint["optimizer_states"]
        groups = self.optimizers[0].param_groups
        if others or len(state.get("settings", ())) != len(groups):
            raise ConfigError(
                'strategy="penstock" goes on from what it saved, found a checkpoint of another strategy, or '
                "of other groups of parameters; load its weights by load_from_checkpoint, and train anew"
            )
        for group, settings in zip(groups, state["settings"], strict=True):
            group |= settings
        rest = {name: value for name, value in state.items() if name != "settings"}
        self._resumed = rest or None  # of a checkpoint from before the first step there is none

    def _close(self) -> None:
        if self.pipe is not None:
            self.pipe.close()
            self.pipe = None

    def on_exception(self, exception: BaseException) -> None:
        """Free the ranks, of which one may have ended; this one keeps what its stages hold."""
        super().on_exception(exception)
        self._close()

    def teardown(self) -> None:
        """Give all ranks the whole trained module."""
        if self.pipe is not None:
            state = self.lightning_module_state_dict()
            self._close()
            if not self.world.is_alone:
                names = self._module.state_dict()
                found = {name: self._tensor_of(0, state.get(name), tag=WEIGHTS) for name in names}
                self._module.load_state_dict(found)
        super().teardown()


def _is_distributed() -> bool:
    """Return whether a metric adds up what the ranks saw: each of them saw all."""
    return False


def _refusing(name: str) -> Callable[..., None]:
    """Return a hook that refuses a call of a layer that lies on another rank."""

    def refuse(*_: Any) -> None:
        raise ConfigError(
            f"a rank trains its own stages, and a test called {name} of the module by itself, whose weights "
            "may be old here; call self(inputs)"
        )

    return refuse


PenstockStrategy.register_strategies(StrategyRegistry)
