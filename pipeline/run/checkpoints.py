"""The checkpoints of a run and its model file: when and where they are written, and which one is read.

    RUN/checkpoints/step_00000200/index.json ...      the state after 200 steps

Writing runs in a thread beside training, from copies, one checkpoint at a time; while one is on its way the
ranks tell each other after every step whether they have written theirs. When all have, a thread of rank 0
makes it whole. No step waits for a disk, unless the next checkpoint is due before the last one is there."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ...compression.codec import decode, encode
from ...compression.errors import CheckpointError, ConfigError, PenstockError, TransportError
from ...conf.schema import CheckpointConfig
from ...stages.files import reason
from ...stages.memory.evictable_tensor import EvictableTensor
from ...stages.safetensors_io import in_order, write_tensors
from ...stages.worker import Worker
from ..checkpoint import INDEX, Checkpoint, Saving, remove
from ..pipeline import Pipeline
from ..runtime.report import Report
from .run_folder import RunFolder, step_of


class Checkpoints:
    """Writes the checkpoints of a run while it trains: ``after`` every step, for ``with``.

    A disk that fills up ends no training: ``tell`` is called with a sentence, and the next one tried.

    Args:       root: where they lie; what lies there behind the step that a run begins with is another past.
                best_step: of the best test, whose checkpoint stays.
    Attributes: notes: makes what a checkpoint keeps of the run beside the state of the pipeline."""

    def __init__(
        self,
        pipe: Pipeline,
        root: Path,
        options: CheckpointConfig,
        *,
        tell: Callable[[str], None],
        best_step: int = 0,
    ) -> None:
        self.pipe, self.root, self.options, self.tell = pipe, root, options, tell
        self._best_step = best_step
        self.notes: Callable[[], Mapping[str, Any]] = dict
        self._worker = Worker("checkpoints", depth=1)
        self._saving: Saving | None = None
        self._last, self._begun, self._told = time.monotonic(), pipe.num_steps, False
        for path in root.glob("step_*") if pipe.rank == 0 else ():
            if step_of(path) > pipe.num_steps:
                remove(path)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.settle()
        if kind is None or not issubclass(kind, KeyboardInterrupt):  # who stops a run waits for no disk
            self._worker.close()

    def after(self, report: Report) -> None:
        """Begin a checkpoint if the steps or the time since the last one say so; lead on one on its way."""
        world, options = self.pipe.world, self.options
        if self._saving and all(row[0] for row in world.all_gather([self._saving.ended], at="a checkpoint")):
            self._lead_on(self._saving)
        due = options.every is not None and (report.step + 1) % options.every == 0
        if options.minutes is not None:  # clocks differ, so rank 0's counts
            late = time.monotonic() - self._last >= 60 * options.minutes
            due = bool(world.broadcast(float(late), 0, at="a checkpoint")) or due
        if due:
            self.settle()
            self._begin()

    def now(self) -> None:
        """Have a checkpoint of this moment, and wait until it is there; collective.

        A stream is drained by one, which changes bits, so those that were asked for must do."""
        self.settle()
        if self._begun != self.pipe.num_steps and not (self.pipe.plan.streams and self.options.every):
            self._begin()
            self.settle()

    def best(self) -> None:
        """Keep a checkpoint of this moment until another one is the best; collective."""
        self.settle()
        self._best_step = self.pipe.num_steps
        is_there = float((self._path(self._best_step) / INDEX).exists())
        if not self.pipe.world.broadcast(is_there, 0, at="the best checkpoint"):
            self._begin()
        else:
            self._keep()

    def _begin(self) -> None:
        self._last, self._begun = time.monotonic(), self.pipe.num_steps
        with self._telling():
            self._saving = Saving(self.pipe, self._path(self._begun), notes=self.notes())
            self._worker.submit(self._saving.write)

    def settle(self) -> None:
        """Wait until one that is on its way is there, and older ones are removed; collective."""
        self._worker.drain()  # a removal takes the folder of one that begins for one that was never whole
        while self._saving:
            self._lead_on(self._saving)
            self._worker.drain()

    def _lead_on(self, saving: Saving) -> None:
        """Finish the checkpoint with all ranks, once all of them have written."""
        self._saving = None
        with self._telling():
            if saving.agreed:
                saving.finish()
                self._told = False
            else:
                saving.agree()
                self._worker.submit(lambda: self._seal(saving))
                self._saving = saving

    def _seal(self, saving: Saving) -> None:
        saving.seal()
        self._keep()

    def _keep(self) -> None:
        """On rank 0, remove all but the newest and the best, and those never whole; link to the best."""
        if self.pipe.rank:
            return
        whole, link = RunFolder(path=self.root.parent).whole_checkpoints(), self.root / "best"
        if (best := self._path(self._best_step)) in whole:
            part = link.with_name("best.part")
            try:
                part.unlink(missing_ok=True)
                part.symlink_to(best.name)
                part.replace(link)
            except OSError as error:
                self.tell(f"{link} cannot be made ({reason(error)}); the best checkpoint is {best.name}")
        best = link.resolve()  # of before, where the new one could not be written
        kept = {*whole[: self.options.keep], *(path for path in whole if path.name == best.name)}
        with contextlib.suppress(ConfigError):  # what cannot be removed is left for the next one
            for path in self.root.glob("step_*"):
                if step_of(path) >= 0 and path not in kept:
                    remove(path)

    def _path(self, step: int) -> Path:
        return self.root / f"step_{step:08}"

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Report what the disk refuses: once, until it takes one again."""
        try:
            yield
        except TransportError:
            raise
        except PenstockError as error:
            if not self._told:
                self.tell(f"a checkpoint was not written, those before stay and training goes on: {error}")
            self._told = True


def export(
    source: Path, target: Callable[[int], Path], tell: Callable[[str], None]
) -> tuple[Checkpoint, Path]:
    """Write the plain model of the newest whole checkpoint of ``source``; return the checkpoint and the file.

    Args:    target: the file for a model behind so many steps."""

    def write(folder: Path) -> tuple[Checkpoint, Path]:
        checkpoint = Checkpoint(folder)
        checkpoint.model_file(path := target(checkpoint.step))
        return checkpoint, path

    return first_whole(find(source, str(source)), write, tell)


def find(source: Path, typed: str) -> list[Path]:
    """The checkpoints that ``source`` names, the newest first: one, or those of a run; never none."""
    if (source / INDEX).exists():
        return [source]
    if found := RunFolder(path=source).whole_checkpoints():
        return found
    raise ConfigError(
        f"{typed} holds no checkpoint; name the folder of a run that wrote one (checkpoint.every=), "
        "or of the checkpoint"
    )


def first_whole(folders: list[Path], read: Callable[[Path], Any], tell: Callable[[str], None]) -> Any:
    """Read the first of some checkpoints that is not damaged, and say which were; raises CheckpointError."""
    *newer, last = folders
    tail = "; take an earlier checkpoint"
    for folder in newer:
        try:
            return read(folder)
        except CheckpointError as error:
            tell(f"{str(error).removesuffix(tail)}; the checkpoint before is taken")
    try:
        return read(last)
    except CheckpointError as error:
        if not newer or not str(error).endswith(tail):
            raise
        raise CheckpointError(
            f"{str(error).removesuffix(tail)}, and so are the {len(newer)} after it; there is no other "
            "checkpoint: take one from a copy, or begin anew"
        ) from error


def write_model(pipe: Pipeline, path: Path, *, before: Callable[[], object]) -> None:
    """Write the model's tensors on rank 0 and end ``pipe``; collective.

    Where that fails they go into a folder for temporary files, lest the training was in vain, and a
    ConfigError on rank 0 says so. ``before`` raises where the file is not to be written there."""
    error, aside, lost = _write(pipe, path, before), None, False
    if pipe.world.broadcast(float(error is not None), 0, at="the weights"):
        with contextlib.suppress(OSError):
            aside = Path(tempfile.mkdtemp(prefix="penstock_weights_")) / path.name if pipe.rank == 0 else None
        lost = _write(pipe, aside or path, lambda: None) is not None
    pipe.close(keeps_model=False)
    if lost and aside:
        aside.parent.rmdir()
    if error is not None:
        where = "the trained weights are lost" if lost or not aside else f"the trained weights are in {aside}"
        raise ConfigError(f"{error}; {where}") from error


@contextlib.contextmanager
def keeping(path: Path) -> Iterator[None]:
    """Say of whatever cannot be written in the block that the weights were."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error}; the trained weights are in {path}") from error


def _write(pipe: Pipeline, path: Path, before: Callable[[], object]) -> ConfigError | None:
    """Write the file on rank 0, and return the error; every rank hands over all that it has either way."""
    shapes = {key: pipe.state.expected[key] for key in pipe.state.keys}
    rest, error, offloaded = iter(in_order(shapes)), None, pipe.update.offloaded()

    def read(name: str) -> Tensor:
        assert next(rest) == name
        tensor = _gather(pipe, name, offloaded)
        assert tensor is not None
        return tensor

    if pipe.rank == 0:
        try:
            before()
            write_tensors(path, shapes, read=read)
        except ConfigError as refusal:
            error = refusal
    for name in rest:
        _gather(pipe, name, offloaded)
    return error


def _gather(pipe: Pipeline, key: str, offloaded: Mapping[int, EvictableTensor]) -> Tensor | None:
    """Return the tensor of a key of the model on rank 0, None elsewhere; collective."""
    state, frames = pipe.state, list[Tensor]()
    first = state.shared.get(key, key)
    if state.source[first] == pipe.world.rank:
        tensor = state.held[first]
        resident = offloaded[id(tensor)].get() if id(tensor) in offloaded else tensor
        frames.append(encode(resident.detach().cpu(), codec="raw"))
    gathered = pipe.world.gather(frames, at="the weights")
    return next((decode(frame) for some in gathered or () for frame in some), None)
