"""A checkpoint that somebody wrote by hand, its checksums included, is refused in one sentence, or is one."""

import copy
import json
import random
import shutil
import struct

import pytest
from cases import Case, pipeline_with_batches
from sampling import is_whole, number_of, seed_of
from test_checkpoints import differences

import penstock
from penstock.pipeline import checkpoint
from penstock.stages.safetensors_io import checksum

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
