"""Checkpoints of a mirror: the files of a pipeline without one, and few tensors near while they pass."""

import weakref

import pytest
import torch
from far import FarStore, small_pieces
from test_mirror import BATCH, bytes_near, deep, made

import penstock
from penstock.pipeline.checkpoint import Checkpoint, Saving
from penstock.pipeline.runtime import ownership
from penstock.stages.memory.evictable_tensor import EvictableTensor
from penstock.stages.safetensors_io import TensorFile

ONE = 64 * 64 * 4  # bytes of the weights of a layer
TARGETS = torch.zeros(8, 64)


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch):
    """Into stores that keep nothing of what they are given but its bytes."""
    monkeypatch.setattr(ownership, "LEAST_MIRRORED", 1)
    small_pieces(monkeypatch)
    monkeypatch.setattr(ownership, "open_store", lambda tier, options: FarStore())


def trained(tier, *, steps=2, scale=1.0, model=None):
    model = model or deep()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    pipe = made(model, parameters_tier=tier)
    for _ in range(steps):
        pipe.step(BATCH, TARGETS)
    return model, pipe


def part(folder):
    """The bytes of the only part of a checkpoint."""
    (path,) = folder.glob("rank_*.safetensors")
    return path.read_bytes()


class Near:
    """The most bytes of parameters, gradients and states, and of what came of a store or a file, at once."""

    def __init__(self, monkeypatch, model, pipe):
        self.most, self.came = 0, []
        optimizer = pipe.update.optimizers[0]

        def watched(read):
            def reading(*given):
                found = read(*given)
                self.came.append(weakref.ref(found.untyped_storage()))
                alive = {id(s): s.nbytes() for r in self.came if (s := r()) is not None}
                self.most = max(self.most, sum(alive.values()) + bytes_near(model, optimizer))
                return found

            return reading

        monkeypatch.setattr(EvictableTensor, "get", watched(EvictableTensor.get))
        monkeypatch.setattr(TensorFile, "read", watched(TensorFile.read))


@pytest.mark.parametrize("tier", ["packed", "host", "disk"])
def test_files_are_those_without_a_mirror_and_few_tensors_are_near(tier, tmp_path, monkeypatch):
    _, plain = trained("device")
    penstock.save(plain, tmp_path / "plain")
    model, pipe = trained(tier)
    mirror = pipe.engine.stages[0].mirror
    moved = [item for one in mirror.memories for item in (one.memory, one.memory, *one._state.values())]
    assert sum(item.num_bytes for item in moved) >= 12 * 4 * ONE
    near, came = Near(monkeypatch, model, pipe), (mirror.frames.bytes_in, mirror.frames.bytes_out)
    penstock.save(pipe, tmp_path / "mirror")
    assert part(tmp_path / "mirror") == part(tmp_path / "plain")
    assert (mirror.frames.bytes_in, mirror.frames.bytes_out) == (
        came[0] + 12 * 3 * ONE,
        came[1],
    )  # each came once, none left anew
    assert 0 < near.most <= 3 * ONE
    assert mirror.resident_bytes < ONE
    plain.close()
    pipe.close()


def test_a_load_has_one_turn_near_and_the_same_bits(tmp_path, monkeypatch):
    _, plain = trained("device")
    penstock.save(plain, tmp_path)
    model, pipe = trained("disk", scale=3.0)
    near = Near(monkeypatch, model, pipe)
    penstock.load(pipe, tmp_path)
    assert 0 < near.most <= 11 * ONE  # with its gradient, and the state before and after
    assert pipe.engine.stages[0].mirror.resident_bytes < ONE
    for one in (plain, pipe):
        one.step(BATCH, TARGETS)
    penstock.save(pipe, tmp_path / "mirror")
    penstock.save(plain, tmp_path / "plain")
    assert part(tmp_path / "mirror") == part(tmp_path / "plain")
    plain.close()
    pipe.close()


def test_what_was_saved_is_as_it_was_then_whenever_it_is_written(tmp_path):
    _, pipe = trained("disk")
    penstock.save(pipe, tmp_path / "then")
    saving = Saving(pipe, tmp_path / "beside", notes={})
    assert saving.ended
    pipe.step(BATCH, TARGETS)
    saving.write()
    saving.agree()
    saving.seal()
    saving.finish()
    assert part(tmp_path / "beside") == part(tmp_path / "then")
    pipe.close()


def test_a_damaged_file_changes_nothing(tmp_path):
    _, pipe = trained("disk")
    penstock.save(pipe, tmp_path / "one")
    pipe.step(BATCH, TARGETS)
    penstock.save(pipe, tmp_path / "two")
    (path,) = (tmp_path / "one").glob("rank_*.safetensors")
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    wanted = pipe.state.wanted(pipe.update)
    with pytest.raises(penstock.CheckpointError, match="altered"):  # so that all ranks may hear of it
        Checkpoint(tmp_path / "one").state(*wanted, streams=True)
    with pytest.raises(penstock.CheckpointError, match="altered"):
        penstock.load(pipe, tmp_path / "one")
    penstock.save(pipe, tmp_path / "three")
    assert part(tmp_path / "three") == part(tmp_path / "two")
    pipe.close()


def test_a_parameter_that_was_written_while_it_was_away_is_refused(tmp_path):
    model, pipe = trained("disk")
    with torch.no_grad():
        next(model.parameters()).zero_()
    with pytest.raises(penstock.PenstockError, match="written to while it was not"):
        penstock.save(pipe, tmp_path)
