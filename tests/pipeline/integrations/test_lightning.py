"""A strategy of Lightning: the bits of a plain loop, validation, checkpoints, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ON_RANKS, run_script
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import penstock

lightning: Any = pytest.importorskip("lightning.pytorch", reason="pip install lightning")
import torchmetrics  # noqa: E402

from penstock.pipeline.integrations.lightning import PenstockStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning says of torch
PARTS = 4


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.ReLU()
        )
        self.head = nn.Linear(16, 4)
        self.seen = torchmetrics.SumMetric()

    def forward(self, x):
        return self.head(self.body(x))

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

    def training_step(self, batch) -> Any:
        raise AssertionError("the stages train")

    def validation_step(self, batch):
        outputs = self(x=batch[0])
        self.seen(float(len(batch[0])))
        self.log("val_seen", self.seen)
        self.log("val_loss", self.loss(outputs, batch[1]), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.body.parameters(), "weight_decay": 0.1}, {"params": self.head.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Plain(Net):
    """The plain loop over micro-batches."""

    def __init__(self, clip=None):
        super().__init__()
        self.automatic_optimization, self.clip = False, clip

    def training_step(self, batch):
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for x, y in zip(*(part.tensor_split(PARTS) for part in batch), strict=True):
            self.manual_backward(self.loss(self(x), y) * (len(x) / len(batch[0])))
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters(), self.clip)
        optimizer.step()
        scheduler: Any = self.lr_schedulers()
        scheduler.step()


def fitted(net: Any, strategy: Any, folder: Path, *, epochs: int = 2, goes_on: Any = None, **options: Any):
    """Train on 62 samples in batches of 16; return the trainer."""
    lightning.seed_everything(0, verbose=False)
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    x = torch.randn(62, 8)
    data = TensorDataset(x, x[:, :4].argmax(1))
    trainer = lightning.Trainer(
        max_epochs=epochs, strategy=strategy, accelerator="cpu", default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, **options,
    )  # fmt: skip
    loaders = DataLoader(data, 16), DataLoader(data, 32)
    trainer.fit(net, *loaders, ckpt_path=goes_on)
    return trainer


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_weights_and_tests_are_those_of_the_plain_loop(clip, tmp_path):
    plain, cut = Plain(clip), Net()
    expected = fitted(plain, "auto", tmp_path / "plain")
    strategy = PenstockStrategy(micro_batches=PARTS, stages=3, clip=clip, codec="zero_value")
    trainer = fitted(cut, strategy, tmp_path / "cut")
    assert same(cut, plain)
    assert trainer.callback_metrics["val_loss"] == expected.callback_metrics["val_loss"]
    assert trainer.callback_metrics["train_loss"] > 0
    path = trainer.checkpoint_callback.best_model_path
    assert same(Net.load_from_checkpoint(path), plain)
    (tested,) = trainer.test(cut, DataLoader(TensorDataset(torch.ones(4, 8), torch.ones(4).long()), 4))
    assert tested["val_loss"] > 0


def test_a_checkpoint_goes_on_on_another_cut(tmp_path):
    plain, half, rest = Plain(), Net(), Net()
    fitted(plain, "auto", tmp_path / "plain")
    first = fitted(half, "penstock", tmp_path / "half", epochs=1)
    path = tmp_path / "after the fit.ckpt"
    first.save_checkpoint(path)
    fitted(rest, PenstockStrategy(stages=3), tmp_path / "rest", goes_on=path)
    assert same(rest, plain)
    assert not same(half, plain)
    other = fitted(Plain(), "auto", tmp_path / "other", epochs=1).checkpoint_callback.best_model_path
    with pytest.raises(penstock.ConfigError, match="found a checkpoint of another strategy"):
        fitted(Net(), "penstock", tmp_path / "refused", goes_on=other)


class WithoutLoss(Net):
    loss: Any = None


class WithoutOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return None


class Hooked(Net):
    def on_after_backward(self):
        raise AssertionError("there is no backward")


class Logs(Net):
    def forward(self, x):
        return super().forward(x) * (1 + self.current_epoch)


SWA = lightning.callbacks.StochasticWeightAveraging


class Dicts(Net):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"inputs": batch[0], "targets": batch[1]} if self.trainer.training else batch


class Thaws(lightning.callbacks.Callback):
    """Adds a group of parameters in the second step."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@pytest.mark.parametrize(
    ("net", "options", "said"),
    [
        (Net, {"accumulate_grad_batches": 2}, "found accumulate_grad_batches=2; give micro_batches="),
        (Net, {"callbacks": [Thaws()]}, "at the first step, 2, found 3; make all"),
        (Net, {"gradient_clip_val": 1.0}, "found gradient_clip_val=1.0; give clip="),
        (Net, {"precision": "bf16-mixed"}, "found precision=bf16-mixed; give autocast="),
        (Plain, {}, "found automatic_optimization=False"),
        (WithoutOptimizer, {}, "returns an optimizer of the module's parameters, found none; return one"),
        (Hooked, {}, "found on_after_backward of the module; leave it out"),
        (Dicts, {}, "is a pair of inputs and targets, found a dict"),
        (Net, {"devices": 2}, "found devices=2; start a rank for each by torchrun"),
        (Logs, {}, "found one that reads its trainer, as self.log and self.current_epoch do"),
        (Net, {"callbacks": [SWA(0.1)]}, "StochasticWeightAveraging of a model with batch norms; leave"),
        (WithoutLoss, {}, r"found no loss\(outputs, targets\) of the module; add that method"),
    ],
)
def test_what_a_pipeline_does_otherwise_is_refused(net, options, said, tmp_path):
    with pytest.raises(penstock.ConfigError, match=said):
        fitted(net(), "penstock", tmp_path, **options)


def test_an_argument_that_no_pipeline_takes_is_refused_at_once():
    with pytest.raises(TypeError, match="unexpected keyword argument 'microbatches'"):
        PenstockStrategy(microbatches=8)


def test_a_schedule_whose_gradients_lightning_would_set_to_zero_is_refused(tmp_path):
    with pytest.raises(penstock.ConfigError, match=r"gradients in flight .*; choose 1f1b and weights=latest"):
        fitted(Net(), PenstockStrategy(weights="double_buffered"), tmp_path)


class Fails(Net):
    def loss(self, outputs, targets):
        if self.global_step == 2:
            raise ZeroDivisionError("of my own")
        return super().loss(outputs, targets)


def test_an_error_of_the_module_ends_the_fit_by_its_name(tmp_path):
    net = Fails()
    with pytest.raises(penstock.StageError, match="ZeroDivisionError: of my own"):
        fitted(net, "penstock", tmp_path)
    assert net(torch.ones(2, 8)).shape == (2, 4)


class Looks(Net):
    """Calls a layer of a layer by itself in a test, which another rank has trained."""

    def validation_step(self, batch):
        x = batch[0]
        for layer in self.body:
            x = layer(x)


SCRIPT = """
import sys, torch
from pathlib import Path
from test_lightning import *
import warnings
warnings.simplefilter("ignore")
name, folder = sys.argv[1:]
net = {"plain": Plain, "ranks": Net, "looks": Looks}[name]()
strategy = "auto" if name == "plain" else PenstockStrategy(micro_batches=PARTS)
trainer = fitted(net, strategy, Path(folder))
found = [trainer.callback_metrics[f"val_{name}"].item() for name in ("loss", "seen")]
torch.save([net.state_dict(), found], f"{name}{trainer.global_rank}")
"""


@pytest.mark.ranks
def test_ranks_of_torchrun_have_the_weights_of_one_process(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    for start, name in ((), "plain"), (ON_RANKS, "ranks"):
        run_script(*start, "script.py", name, str(tmp_path / name), cwd=tmp_path)
    expected, tested = torch.load(tmp_path / "plain0")
    assert tested[1] == 62
    for rank in range(2):
        state, found = torch.load(tmp_path / f"ranks{rank}")
        assert found == tested
        assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert len(list((tmp_path / "ranks").rglob("*.ckpt"))) == 1
    with pytest.raises(AssertionError, match=r"called body.0 of the module by itself.*call self\(inputs\)"):
        run_script(*ON_RANKS, "script.py", "looks", "looks", cwd=tmp_path)
