"""Trainers of Hugging Face transformers: one whose model is cut into stages, one that packs what it saves."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch import nn
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.trainer_utils import EvalLoopOutput

from ...compression.codec import decode, encode
from ...compression.errors import ConfigError
from ...stages.memory.offload import offload
from ...stages.split_inputs import Split
from ...stages.tracing.capture.call_spec import Constant
from ..checkpoint import load, save
from ..pipeline import Pipeline

NUMBER = "num_items_in_batch"  # the input by which models divide the sum of their losses
FOLDER = "penstock"  # of a checkpoint: the parts of all ranks


class PipelineTrainer(Trainer):
    """``transformers.Trainer`` whose model is cut into stages, under torchrun on a rank each.

    ``gradient_accumulation_steps`` is the number of micro-batches of a step. All ranks read the same batches.
    Without random layers the weights have the bits of the plain Trainer in one process. Callbacks, logs,
    evaluation, checkpoints and ``resume_from_checkpoint`` are those of Trainer; rank 0 writes the files.

    Args:
        model: As for Trainer; it returns its loss. ``args``, ``train_dataset`` and all others likewise.
        pipeline: Arguments of ``Pipeline.of``, such as ``stages``, ``cuts``, ``schedule``, ``codec``,
            ``memory`` and ``autocast``. By default there are as many stages as ranks, and 2 in one process.

    Attributes:
        pipe: The Pipeline, from the first step on; until then the model is whole.

    Raises:
        ConfigError: An argument of Trainer asks for what a pipeline does in another way, or not at all.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *arguments: Any,
        pipeline: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        args = args or TrainingArguments("tmp_trainer")
        _check(type(self), args, named)
        state = args.distributed_state  # it has joined the ranks of torchrun
        self.ranks = 1 if state is None else state.num_processes
        if state is not None:  # from here on Trainer sees one process: the same batches on all ranks
            state.num_processes, state.distributed_type = 1, DistributedType.NO
        self.pipe: Pipeline | None = None
        self.options: dict[str, Any] = {"stages": max(2, self.ranks)} | dict(pipeline or {})
        if "cuts" in self.options and "stages" not in (pipeline or {}):
            del self.options["stages"]
        self._micro_batches: list[dict[str, Any]] = []
        self._checkpoint: Path | None = None
        super().__init__(model, args, *arguments, **named)

    # Training: Trainer's loop calls these for every micro-batch and every step.

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return a stand-in without gradients, whose learning rate is logged: stages have optimizers."""
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.args.learning_rate)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """Return the scheduler of the stand-in."""
        self._steps = num_training_steps
        self._logged = super().create_scheduler(num_training_steps, optimizer)
        return self._logged

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Keep a micro-batch; train with the last one of a step, and return the loss of all."""
        model.train()
        self._micro_batches.append(self._arguments(inputs, num_items_in_batch))
        loss = 0.0
        if len(self._micro_batches) == self.current_gradient_accumulation_steps:
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
        assert self.model is not None
        scaled = (
            NUMBER in example
        )  # the losses of micro-batches add up to that of the batch; else it is their mean
        decayed = set(self.get_decay_parameter_names(self.model))
        model: Any = self.model
        kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)

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
                num_warmup_steps=self.args.get_warmup_steps(self._steps),
                num_training_steps=self._steps,
                scheduler_specific_kwargs=dict(self.args.lr_scheduler_kwargs or {}),  # pyright: ignore
            )

        pipe = Pipeline.of(
            self.model,
            {name: Constant(value) if name == NUMBER else value for name, value in example.items()},
            micro_batches=self.args.gradient_accumulation_steps,
            loss=_returned,
            optimizer=optimizer,
            scheduler=scheduler,
            clip=self.args.max_grad_norm or None,
            weight="summed" if scaled else _equal,
            seed=self.args.seed,
            **self.options,
        )
        if self._checkpoint is not None:
            self._logged.load_state_dict(load(pipe, self._checkpoint)["scheduler"])
        return pipe

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self._report.gradient_norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return grad_norm

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
        outputs = self.pipe.evaluate(self._arguments(inputs, number))
        last, world = self.pipe.plan.stages[-1].ranks[0], self.pipe.world
        source = 0 if world.is_alone else last
        loss = world.broadcast(0.0 if outputs is None else float(_returned(outputs, None)), source)
        if prediction_loss_only:
            return torch.tensor(loss), None, None
        config = getattr(self.model, "config", None)
        ignored = ignore_keys or getattr(config, "keys_to_ignore_at_inference", [])
        values = [] if outputs is None else _values(outputs, {"loss", *ignored})
        gathered = world.gather([encode(value) for value in values])
        if gathered is None:
            return torch.tensor(loss), None, None
        found = tuple(decode(frame) for frame in gathered[source])
        labels = tuple(inputs[name] for name in self.label_names if inputs.get(name) is not None)
        one, other = (part[0] if len(part) == 1 else part or None for part in (found, labels))
        return torch.tensor(loss), one, other

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
        assert self.pipe is not None
        save(self.pipe, Path(output_dir) / FOLDER, notes={"scheduler": self._logged.state_dict()})

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._checkpoint = None if checkpoint is None else Path(checkpoint) / FOLDER

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:
            super()._save_rng_state(output_dir)

    def _load_best_model(self) -> None:
        assert self.pipe is not None
        load(self.pipe, Path(str(self.state.best_model_checkpoint)) / FOLDER)


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


def _check(kind: type[Trainer], args: TrainingArguments, named: Mapping[str, Any]) -> None:
    """Refuse what a pipeline does not do, or does by another argument."""
    if args.gradient_accumulation_steps < 2:
        raise ConfigError(
            "gradient_accumulation_steps is the number of micro-batches that follow each other through the "
            "stages, 2 at least, found 1; set 8, and divide per_device_train_batch_size by 8"
        )
    for name, remedy in {
        "bf16": "give pipeline={'autocast': torch.bfloat16}",
        "fp16": "give pipeline={'autocast': torch.bfloat16}",
        "fsdp": "a stage is held whole by its rank; leave it out",
        "deepspeed": "leave it out",
        "torch_compile": "compile modules of the model instead",
        "label_smoothing_factor": "have the model return the loss that it trains with",
        "save_only_model": "leave it out; a checkpoint also has the parts of the ranks",
    }.items():
        if value := getattr(args, name, None):
            raise ConfigError(f"PipelineTrainer takes no {name}, found {value!r}; {remedy}")
    if named.get("compute_loss_func") or kind.compute_loss is not Trainer.compute_loss:
        raise ConfigError(
            "PipelineTrainer trains with the loss that the model returns, found a compute_loss of your own; "
            "compute it in the model's forward"
        )
    if any(named.get("optimizers") or ()):
        raise ConfigError(
            "each stage makes its own optimizer, found optimizers=; give optimizer_cls_and_kwargs= or optim="
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
