"""Trainers of Hugging Face transformers: one whose model is cut into stages, one that packs what it saves."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.trainer_utils import EvalLoopOutput

from ...compression.codec import decode, encode
from ...compression.errors import ConfigError
from ...stages.memory.offload import offload
from ...stages.plan.validation import streams
from ...stages.split_inputs import Split
from ...stages.tracing.capture.call_spec import Constant
from ..checkpoint import load, save
from ..pipeline import Pipeline, check_settings

NUMBER = "num_items_in_batch"  # the input by which models divide the sum of their losses
FOLDER = "penstock"  # of a checkpoint: the parts of all ranks


class PipelineTrainer(Trainer):
    """``transformers.Trainer`` whose model is cut into stages, under torchrun on a rank each.

    ``gradient_accumulation_steps`` is the number of micro-batches of a step. All ranks read the same batches.
    Without random layers the weights have the bits of the plain Trainer in one process. Callbacks, logs,
    evaluation, checkpoints and ``resume_from_checkpoint`` are those of Trainer; rank 0 writes the files.

    Args:
        model: As for Trainer; it returns its loss.
        args: As for Trainer.
        pipeline: Arguments of ``Pipeline.of``, such as ``stages``, ``cuts``, ``schedule``, ``codec``,
            ``memory`` and ``autocast``. By default there are as many stages as ranks, and 2 in one process.
        named: All others of Trainer.

    Attributes:
        pipe: The Pipeline, from the first step on; until then the model is whole. After training the model of
            rank 0 is whole again.

    Raises:
        ConfigError: An argument of Trainer asks for what a pipeline does in another way, or not at all.
        TypeError: ``Pipeline.of`` does not take an entry of ``pipeline``.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        pipeline: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        self.options = dict(pipeline or {})
        args = args or TrainingArguments("tmp_trainer")
        check_settings(self.options)
        _check(type(self), args, named, self.options)
        state = args.distributed_state  # it has joined the ranks of torchrun
        is_joined = dist.is_available() and dist.is_initialized()
        if not is_joined and not self.options.keys() & {"stages", "cuts", "ranks", "replicas", "program"}:
            self.options["stages"] = 2
        self.options.setdefault("deadline", float(args.ddp_timeout))  # rank 0 writes and evaluates alone
        if state is not None:  # from here on Trainer sees one process: the same batches on all ranks
            state.num_processes, state.distributed_type = 1, DistributedType.NO
            state.process_index = dist.get_rank() if is_joined else 0
        args._n_gpu = min(1, args.n_gpu)
        accelerator: Any = args.accelerator_config
        accelerator.dispatch_batches = False
        self.pipe: Pipeline | None = None
        self._micro_batches: list[dict[str, Any]] = []
        self._checkpoint: Path | None = None
        super().__init__(model, args, **named)

    # Training: Trainer's loop calls these for every micro-batch and every step.

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return a stand-in without gradients, whose learning rate is logged: stages have optimizers."""
        if self.pipe is not None:
            raise ConfigError(
                "a PipelineTrainer trains once, found a second train(); make another one, and give "
                "resume_from_checkpoint="
            )
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.args.learning_rate)
        return self.optimizer

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Return the micro-batches of the next step; what an interrupt left of the last one is forgotten."""
        self._micro_batches = []
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Keep a micro-batch; train with the last one of a step, and return the loss of all."""
        model.train()
        self._micro_batches.append(self._arguments(inputs, num_items_in_batch))
        loss = 0.0
        if self.accelerator.sync_gradients:
            batch, self._micro_batches = Split(tuple(self._micro_batches)), []
            if self.pipe is None:
                self.pipe = self._cut(batch.micro_batches[0])
            self._report = self.pipe.step(batch)
            loss = self._report.loss
        return torch.tensor(loss, device=self.args.device)

    def _arguments(self, inputs: Mapping[str, Any], number: torch.Tensor | int | None) -> dict[str, Any]:
        given = dict(self._prepare_inputs(inputs))  # pyright: ignore[reportArgumentType]
        if number is not None and self.model_accepts_loss_kwargs:
            given[NUMBER] = torch.as_tensor(number)
        return given

    def _cut(self, example: Mapping[str, Any]) -> Pipeline:
        """Cut the model, whose weights are whole and of the checkpoint, and go on after its step."""
        model: Any = self.model
        decayed = set(self.get_decay_parameter_names(model))
        kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
        steps, given = self.state.max_steps, self.args.lr_scheduler_kwargs
        assert not isinstance(given, str), "TrainingArguments reads JSON"

        def optimizer(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
            groups = [[p for name, p in named if (name in decayed) is decays] for decays in (True, False)]
            decay = (self.args.weight_decay, 0.0)
            return kind(
                [{"params": g, "weight_decay": d} for g, d in zip(groups, decay, strict=True) if g], **options
            )

        def scheduler(optimizer: torch.optim.Optimizer) -> Any:
            return get_scheduler(
                self.args.lr_scheduler_type,
                optimizer=optimizer,
                num_warmup_steps=self.args.get_warmup_steps(steps),
                num_training_steps=steps,
                scheduler_specific_kwargs=given,
            )

        pipe = Pipeline.of(
            model,
            {name: Constant(value) if name == NUMBER else value for name, value in example.items()},
            micro_batches=self.args.gradient_accumulation_steps,
            loss=_returned,
            optimizer=optimizer,
            scheduler=scheduler,
            clip=self.args.max_grad_norm or math.inf,
            weight="summed" if NUMBER in example else _equal,
            seed=self.args.seed,
            **self.options,
        )
        if self._checkpoint is not None:
            logged: Any = self.lr_scheduler
            logged.load_state_dict(load(pipe, self._checkpoint)["scheduler"])
        return pipe

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._report.gradient_norm

    _clip_grad_norm = _get_grad_norm

    def _finalize_training(self, *arguments: Any, **named: Any) -> Any:
        self._complete()
        return super()._finalize_training(*arguments, **named)

    def _complete(self) -> None:
        """Bring the weights of all stages into the model of rank 0."""
        if self.pipe is None or self.pipe.world.is_alone:
            return
        state = self.pipe.state_dict()["model"]
        if self.pipe.rank == 0:
            with self.pipe.parameters_resident():
                self.model.load_state_dict(state)  # pyright: ignore[reportOptionalMemberAccess]

    def _get_dataloader(self, *arguments: Any, **named: Any) -> Any:
        state = self.args.distributed_state
        if state is None:
            return super()._get_dataloader(*arguments, **named)
        place, state.process_index = state.process_index, 0  # the processes of all ranks draw alike
        try:
            return super()._get_dataloader(*arguments, **named)
        finally:
            state.process_index = place

    # Evaluation: the rank of the last stage has the outputs, and rank 0 computes with them.

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return loss, outputs and labels of a batch; the latter two on rank 0, else None."""
        if self.pipe is None:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        number = self._get_num_items_in_batch([inputs], self.args.device)
        outputs, world = self.pipe.evaluate(self._arguments(inputs, number)), self.pipe.world
        source = 0 if world.is_alone else self.pipe.plan.owner(-1)
        mine = 0.0 if outputs is None else float(_returned(outputs, None))
        loss = torch.tensor(world.broadcast(mine, source))
        if prediction_loss_only:
            return loss, None, None
        if ignore_keys is None:
            ignore_keys = getattr(getattr(self.model, "config", None), "keys_to_ignore_at_inference", None)
        values = [] if outputs is None else _values(outputs, {"loss", *(ignore_keys or ())})
        gathered = world.gather([encode(value.cpu(), "raw") for value in values])
        if gathered is None:
            return loss, None, None
        found = tuple(decode(frame) for frame in gathered[source])
        labels = tuple(inputs[name] for name in self.label_names if inputs.get(name) is not None)
        logits, labels = (part[0] if len(part) == 1 else part or None for part in (found, labels))
        return loss, logits, labels

    def evaluation_loop(self, *arguments: Any, **named: Any) -> EvalLoopOutput:
        """Evaluate; the metrics are those of rank 0 on all ranks, which decide alike."""
        output = super().evaluation_loop(*arguments, **named)
        if self.pipe is None:
            return output
        return output._replace(metrics=self.pipe.world.all_gather_json(output.metrics)[0])

    # Checkpoints: the plain model as Trainer writes it, and next to it the parts of all ranks.

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.pipe is not None:
            state_dict = self.pipe.state_dict()["model"]
        settings = vars(config) if (config := getattr(self.model, "config", None)) else {}
        before = dict(settings)
        super()._save(output_dir, state_dict)
        settings.clear()  # what it writes there would be another model than the one that was recorded
        settings.update(before)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.pipe is None:
            return
        best = self.pipe.world.all_gather_json(self.state.best_model_checkpoint)
        self.state.best_model_checkpoint = best[0]  # other ranks may not see the folder yet
        logged: Any = self.lr_scheduler
        save(self.pipe, Path(output_dir) / FOLDER, notes={"scheduler": logged.state_dict()})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        found = Path(checkpoint) / FOLDER
        if not found.is_dir():
            raise ConfigError(
                f"a PipelineTrainer goes on from what one saved, found no folder {FOLDER} in {checkpoint}; "
                "load its model with from_pretrained, and train anew"
            )
        self._checkpoint = found

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _load_best_model(self) -> None:
        if self.pipe is None:
            return super()._load_best_model()
        load(self.pipe, Path(str(self.state.best_model_checkpoint)) / FOLDER)
        return self._complete()


class OffloadMixin:
    """Packs what forwards save until their backward: ``class MyTrainer(OffloadMixin, Trainer)``.

    Attributes:
        tier: As for ``penstock.offload``: "packed", "host" or "disk".
        saved: Of the last forward: its ``bytes_raw`` and ``bytes_kept``.
    """

    tier = "packed"

    def compute_loss_context_manager(self) -> contextlib.ExitStack:
        """Return Trainer's context of a forward, with ``penstock.offload`` around it."""
        stack = super().compute_loss_context_manager()  # pyright: ignore[reportAttributeAccessIssue]
        self.saved = stack.enter_context(offload(self.tier))
        return stack


def _check(
    kind: type[Trainer], args: TrainingArguments, named: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Refuse what a pipeline does not do, or does by another argument."""
    if args.gradient_accumulation_steps < 2:
        raise ConfigError(
            "gradient_accumulation_steps is the number of micro-batches that follow each other through the "
            "stages, 2 at least, found 1; set 8, and divide per_device_train_batch_size by 8"
        )
    autocast = "give pipeline={'autocast': torch.bfloat16}"
    for name, remedy in {
        "bf16": autocast,
        "fp16": autocast,
        "bf16_full_eval": autocast,
        "fp16_full_eval": autocast,
        "fsdp": "a stage is held whole by its rank; leave it out",
        "deepspeed": "leave it out",
        "torch_compile": "compile modules of the model instead",
        "label_smoothing_factor": "have the model return the loss that it trains with",
        "save_only_model": "leave it out; a checkpoint also has the parts of the ranks",
        "save_on_each_node": "leave it out; rank 0 writes, into a folder that all ranks see",
        "auto_find_batch_size": "leave it out",
        "gradient_checkpointing": "give pipeline={'recompute': True}",
    }.items():
        if value := getattr(args, name, None):
            raise ConfigError(f"PipelineTrainer takes no {name}, found {value!r}; {remedy}")
    if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        raise ConfigError(
            f"schedulers of stages step without a metric, found {args.lr_scheduler_type!s}; take another one"
        )
    if streams(options.get("schedule", ""), options.get("weights", "latest")):
        raise ConfigError(
            "Trainer sets all gradients to zero after a step, found a schedule that has some in flight there "
            "(async_1f1b, weights=double_buffered); choose 1f1b and weights=latest"
        )
    loss, optimizer = "compute the loss in the model's forward", "give optimizer_cls_and_kwargs= or optim="
    own = {
        "compute_loss": loss,
        "training_step": loss,
        "create_optimizer": optimizer,
        "create_scheduler": "give lr_scheduler_type=",
    }
    found = {name: own[name] for name in own if getattr(kind, name) is not getattr(PipelineTrainer, name)}
    found |= {"compute_loss_func": loss} if named.get("compute_loss_func") else {}
    found |= {"optimizers": optimizer} if any(named.get("optimizers") or ()) else {}
    for name, remedy in found.items():
        raise ConfigError(
            f"a PipelineTrainer trains with the loss that the model returns and an optimizer for each stage, "
            f"found {name} of your own; {remedy}"
        )


def _returned(outputs: Any, targets: Any) -> torch.Tensor:
    """The loss among what the model returns."""
    return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]


def _equal(targets: Any) -> float:
    """Every micro-batch counts alike."""
    return 1.0


def _values(outputs: Any, ignored: set[str]) -> list[torch.Tensor]:
    """The tensors among the outputs, without the loss."""
    named = outputs.items() if isinstance(outputs, Mapping) else enumerate(outputs[1:])
    return [value for name, value in named if name not in ignored and isinstance(value, torch.Tensor)]
