"""Files of weights as people bring them: read tensor by tensor, refused where they are not what they say."""

import json
import struct

import pytest
import torch
from reference import same_bits
from safetensors.torch import save_file

import penstock
from penstock.stages.safetensors_io import WeightsFile

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
TENSORS = {str(dtype): (torch.arange(24).reshape(2, 3, 4) % 5).to(dtype) for dtype in DTYPES}
TENSORS |= {
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "eight": torch.ones(4).to(torch.float8_e5m2),
}


def test_every_dtype_is_read_into_memory_of_any_layout(tmp_path):
    save_file(TENSORS, tmp_path / "some.safetensors", metadata={"format": "pt"})
    file = WeightsFile(tmp_path / "some.safetensors")
    assert set(file.entries) == set(TENSORS)
    for name, tensor in TENSORS.items():
        out = torch.empty_like(tensor)
        file.read(name, out)
        assert same_bits(out, tensor)
        turned = torch.empty(tensor.shape[::-1], dtype=tensor.dtype)
        turned = turned.permute(tuple(reversed(range(tensor.dim()))))
        file.read(name, turned)
        assert same_bits(turned, tensor)
    assert file.entries["scalar"].form == "float32 ()"


def test_the_index_of_several_files_is_one(tmp_path):
    for part, names in (("a", list(TENSORS)[:4]), ("b", list(TENSORS)[4:])):
        save_file({name: TENSORS[name] for name in names}, tmp_path / f"{part}.safetensors")
    where = {name: f"{'a' if i < 4 else 'b'}.safetensors" for i, name in enumerate(TENSORS)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    file, out = WeightsFile(index), torch.empty(())
    assert set(file.entries) == set(TENSORS)
    file.read("scalar", out)
    assert out == 2.5
    assert file.digest == WeightsFile(index).digest != WeightsFile(tmp_path / "a.safetensors").digest
    for more, told in ("a.safetensors", r"a\.safetensors lacks more"), ("../a.safetensors", "lie beside it"):
        index.write_text(json.dumps({"weight_map": where | {"more": more}}))
        with pytest.raises(penstock.ConfigError, match=told):
            WeightsFile(index)


def written(tmp_path, entries, *, data=b"\0" * 16, length=None):
    """A file whose header says ``entries``."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
OFFSETS = [[0, 12], [4, 20], [-16, 0], [16, 0], 3]
SHAPES = [[-2, -2], [2.0, 2], "22", [1 << 40, 1 << 40]]
ODD = [{"data_offsets": one} for one in OFFSETS] + [{"shape": one} for one in SHAPES]
HEADERS = [b"", b"{", b"[1]", b"\xff\xfe", b'{"w": 3}', b"[" * 9999]


@pytest.mark.parametrize("header", [*ODD, {"dtype": "F99"}, {"dtype": None}, *HEADERS], ids=str)
def test_what_a_header_says_is_held_against_the_file(header, tmp_path):
    WeightsFile(written(tmp_path, {"w": GOOD}))
    path = written(tmp_path, {"w": GOOD | header} if isinstance(header, dict) else header)
    with pytest.raises(penstock.ConfigError, match=r"odd\.safetensors is none, or was cut short"):
        WeightsFile(path)


def test_a_header_that_ends_behind_the_file_is_not_read(tmp_path):
    with pytest.raises(penstock.ConfigError, match="none, or was cut short"):
        WeightsFile(written(tmp_path, {"w": GOOD}, length=1 << 62))


def test_files_that_are_not_there_or_end_too_early_are_said(tmp_path):
    with pytest.raises(penstock.ConfigError, match=r"gone\.safetensors cannot be read \(No such file"):
        WeightsFile(tmp_path / "gone.safetensors")
    for name in ("a.safetensors", "b.safetensors.index.json"):
        (tmp_path / name).symlink_to("/dev/zero")
        with pytest.raises(penstock.ConfigError, match="it is no regular file"):
            WeightsFile(tmp_path / name)
    path = written(tmp_path, {"w": GOOD})
    file = WeightsFile(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(penstock.ConfigError, match="it ends within w; give another file"):
        file.read("w", torch.empty(2, 2))
