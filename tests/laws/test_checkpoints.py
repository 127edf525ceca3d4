"""Law L6: a checkpoint goes on with the bits of the run that was not stopped, on any cut and schedule."""

import copy
import dataclasses
import json
import os
import random
import shutil
import struct

import cases
import pytest
import torch
from cases import Case, pipeline_of, pipeline_with_batches, plan_of, refusal_of
from reference import same_bits
from sampling import is_whole, number_of, seed_of
from torch.optim import lr_scheduler
from torch.utils._pytree import keystr, tree_flatten_with_path
from zoo import build

import penstock
from penstock.pipeline import checkpoint
from penstock.pipeline.checkpoint import Saving
from penstock.stages.safetensors_io import checksum

SMALL = Case(model="mlp", cuts=3, optimizer="adamw", scheduler=True, steps=4)
KEPT = 2  # steps before the checkpoint


def differences(ours, theirs):
    """Paths at which two states differ, bit for bit; strides included."""
    a, b = ({keystr(path): leaf for path, leaf in tree_flatten_with_path(one)[0]} for one in (ours, theirs))

    def same(x, y):
        return same_bits(x, y) and x.stride() == y.stride() if isinstance(x, torch.Tensor) else x == y

    return sorted(a.keys() ^ b.keys()) + [path for path in a.keys() & b.keys() if not same(a[path], b[path])]


def made(case, plan=None, seed=None):
    """A pipeline of a case and its batches; ``seed``: with weights that a load has yet to replace."""
    model, batches = build(case.model, case.dtype, case.steps)
    if seed is not None:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.mul_(3)
    return pipeline_of(case, plan or plan_of(case)[0], model), batches


def interrupted(case, folder, plan=None):
    """Train and save on the way; the state at the end and the losses behind the checkpoint."""
    pipe, batches = made(case, plan)
    for batch in batches[:KEPT]:
        pipe.step(*batch)
    penstock.save(pipe, folder, notes={"epoch": 1})
    losses = [pipe.step(*batch).loss for batch in batches[KEPT:]]
    return pipe.state_dict(), losses


def resumed(case, folder, plan=None):
    pipe, batches = made(case, plan, seed=1)
    assert penstock.load(pipe, folder) == {"epoch": 1}
    losses = [pipe.step(*batch).loss for batch in batches[KEPT:]]
    return pipe.state_dict(), losses


def without_versions(state):
    return {key: item for key, item in state.items() if key != "versions"}


def test_a_second_save_takes_the_place_of_the_first(tmp_path):
    pipe, batches = made(SMALL)
    pipe.step(*batches[0])
    penstock.save(pipe, tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    pipe.step(*batches[1])
    penstock.save(pipe, tmp_path)
    after = {path.name for path in tmp_path.iterdir()}
    assert len(after) == len(before) == 2
    assert after & before == {"index.json"}
    again, _ = made(SMALL, seed=1)
    penstock.load(again, tmp_path)
    assert again.num_steps == 2


def test_training_goes_on_while_a_copy_is_written(tmp_path):
    pipe, batches = made(SMALL)
    pipe.step(*batches[0])
    before = pipe.state_dict()
    saving = Saving(pipe, tmp_path, notes={})
    pipe.step(*batches[1])
    saving.write()
    saving.agree()
    saving.seal()
    pipe.step(*batches[2])
    saving.finish()
    again, _ = made(SMALL, seed=1)
    penstock.load(again, tmp_path)
    assert not differences(again.state_dict(), before)


def test_schedulers_in_a_scheduler_and_rates_in_tensors_go_on_from_a_checkpoint(tmp_path, monkeypatch):
    def sequential(optimizer):
        parts = [lr_scheduler.ConstantLR(optimizer, 0.5, 2), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return lr_scheduler.SequentialLR(optimizer, parts, [3])

    monkeypatch.setitem(cases.SCHEDULERS, "sequential", sequential)
    by_tensor = lambda named: torch.optim.SGD(named, lr=torch.tensor(0.1))  # noqa: E731
    monkeypatch.setitem(cases.OPTIMIZERS, "by tensor", by_tensor)
    case = dataclasses.replace(SMALL, scheduler="sequential", optimizer="by tensor", steps=5)
    state, losses = interrupted(case, tmp_path)
    again, same = resumed(case, tmp_path)
    assert same == losses
    assert not differences(again, state)


def flipped(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_checkpoint_that_was_altered_anywhere_is_refused_and_nothing_changes(tmp_path):
    interrupted(SMALL, tmp_path / "whole")
    (part,) = (tmp_path / "whole").glob("rank_0_*.safetensors")
    length = part.stat().st_size
    header = 8 + int.from_bytes(part.read_bytes()[:8], "little")
    pipe, _ = made(SMALL, seed=1)
    before = pipe.state_dict()
    places = [0, 7, 8, header // 2, header - 1, header, (header + length) // 2, length - 1]
    places.append(part.read_bytes().index(b"0.001") + 4)  # a number of the optimizer, which stays one
    harms = [(part.name, place) for place in places]
    text = (tmp_path / "whole" / "index.json").read_text()
    harms += [("index.json", text.index(word) + 2) for word in ('"step": 2', '"checksum"', '"epoch"')]
    for name, place in harms:
        shutil.rmtree(tmp_path / "harmed", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "harmed")
        flipped(tmp_path / "harmed" / name, place)
        with pytest.raises(penstock.CheckpointError, match="is damaged"):
            penstock.load(pipe, tmp_path / "harmed")
    for size in (0, 5, header - 1, header, length - 1):
        shutil.copytree(tmp_path / "whole", tmp_path / "harmed", dirs_exist_ok=True)
        with (tmp_path / "harmed" / part.name).open("rb+") as file:
            file.truncate(size)
        with pytest.raises(penstock.CheckpointError, match=rf"damaged: it has {size:,} bytes of {length:,}"):
            penstock.load(pipe, tmp_path / "harmed")
    (tmp_path / "harmed" / part.name).unlink()
    with pytest.raises(penstock.CheckpointError, match=r"cannot be read \(No such file"):
        penstock.load(pipe, tmp_path / "harmed")
    with pytest.raises(penstock.CheckpointError, match="holds no checkpoint"):
        penstock.load(pipe, tmp_path / "nowhere")
    index = tmp_path / "harmed" / "index.json"
    index.write_text("[" * 200_000)
    with pytest.raises(penstock.CheckpointError, match="is damaged or of another version"):
        penstock.load(pipe, tmp_path / "harmed")
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(penstock.CheckpointError, match=r"cannot be read \(it is no regular file"):
        penstock.load(pipe, tmp_path / "harmed")
    assert not differences(pipe.state_dict(), before)


def refused_on_ranks(case, folder, plan):
    return refusal_of(penstock.load, made(case, plan)[0], folder)


def test_ranks_write_and_read_their_own_parts_on_other_cuts_with_the_same_bits(ranks, tmp_path):
    on_two = dataclasses.replace(SMALL, cuts=2)
    other = dataclasses.replace(SMALL, cuts=4, ranks=2, schedule="zbv")
    expected, losses = interrupted(SMALL, tmp_path / "alone")
    saved = ranks.run(interrupted, on_two, tmp_path / "run", plan_of(on_two)[0], ranks=2)
    assert [after for _, after in saved] == [losses] * 2
    parts = json.loads((tmp_path / "run" / "index.json").read_text())["parts"]
    assert [part["file"][:7] for part in parts] == ["rank_0_", "rank_1_"]
    assert sum(part["bytes"] for part in parts) < 1.2 * sum(
        path.stat().st_size for path in (tmp_path / "alone").glob("*.safetensors")
    )
    found = ranks.run(resumed, other, tmp_path / "run", plan_of(other)[0], ranks=2)
    assert [after for _, after in found] == [losses] * 2
    assert not differences(without_versions(found[0][0]), without_versions(expected))
    state, after = resumed(SMALL, tmp_path / "run")
    assert after == losses
    assert not differences(without_versions(state), without_versions(expected))


def test_what_one_rank_finds_damaged_all_refuse_in_the_same_words(ranks, tmp_path):
    case = dataclasses.replace(SMALL, cuts=2)
    plan, _ = plan_of(case)
    ranks.run(interrupted, case, tmp_path, plan, ranks=2)
    (part,) = tmp_path.glob("rank_1_*.safetensors")
    flipped(part, part.stat().st_size - 1)  # in a tensor that only rank 1 reads
    said = ranks.run(refused_on_ranks, case, tmp_path, plan, ranks=2)
    assert said[0] == said[1]
    assert said[0].startswith("CheckpointError: ")
    assert "is damaged" in said[0]


CASE = Case(model="mlp", cuts=2, optimizer="adam", steps=2, scheduler=True)
VALUES = [None, True, -1, 0, 1 << 70, 1.5, float("nan"), "x", "", [], {}, [1], {"a": 1}]


def paths(item, path=()):
    """The way to every part of some JSON."""
    keys = item if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
    for key in keys:
        yield (*path, key)
        yield from paths(item[key], (*path, key))


def forged(content, chance):
    """The content with one part exchanged or taken out, and what that was."""
    path, new = chance.choice(list(paths(content))), copy.deepcopy(content)
    at = new
    for key in path[:-1]:
        at = at[key]
    if chance.random() < 0.1:
        del at[path[-1]]
        return new, (path, "gone")
    at[path[-1]] = chance.choice(VALUES)
    return new, (path, at[path[-1]])


def forge(folder, chance):
    """Forge the index, the header of a file of tensors, or what that says of them; returns what was."""
    index = json.loads((folder / "index.json").read_text())
    del index["checksum"]
    part = index["parts"][0]
    data = (folder / part["file"]).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    match chance.choice(["index", "header", "notes", "notes"]):
        case "index":
            index, what = forged(index, chance)
        case "header":
            header, what = forged(header, chance)
        case _:
            notes, what = forged(json.loads(header["__metadata__"]["penstock"]), chance)
            header["__metadata__"]["penstock"] = json.dumps(notes)
    text = json.dumps(header).encode()
    begin = struct.pack("<Q", len(text)) + text
    (folder / part["file"]).write_bytes(begin + data[8 + length :])
    if index.get("parts") == [part]:
        index["parts"] = [{**part, "bytes": len(begin) + len(data) - 8 - length, "header": checksum(begin)}]
    (folder / "index.json").write_text(json.dumps({**index, "checksum": checkpoint._checksum(index)}))
    return what


def test_a_forged_checkpoint_is_refused_and_nothing_changes(tmp_path, pytestconfig):
    pipe, batches = pipeline_with_batches(CASE)
    pipe.step(*batches[0])
    penstock.save(pipe, tmp_path / "whole", notes={"epoch": 1})
    pipe.step(*batches[1])
    before, chance, refused = pipe.state_dict(), random.Random(number_of(seed_of(pytestconfig))), 0
    number = 1000 if is_whole(pytestconfig) else 60
    for _ in range(number):
        shutil.rmtree(tmp_path / "forged", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "forged")
        what = forge(tmp_path / "forged", chance)
        try:
            penstock.load(pipe, tmp_path / "forged")
        except penstock.PenstockError:
            refused += 1
            assert differences(pipe.state_dict(), before) == [], what
        except Exception as error:
            pytest.fail(f"{what}: {error!r}")
        else:
            pipe.load_state_dict(before)
    assert number // 4 < refused < number
    pipe.close()
