"""The house: who may import whom, what the wheel holds, and the traps of a root that is the package."""

import ast
import configparser
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT, copy_to, files, run
from imports import SCRIPTS, imports_of, names_in, package_of

import penstock

LOW = (
    "compression", "stages.device", "stages.files", "stages.meta_watch", "stages.record",
    "stages.safetensors_io", "stages.seeds", "stages.split_inputs", "stages.torch_private", "stages.units",
    "stages.worker",
)  # fmt: skip
STAGE = ("stages.tracing", "stages.memory", "stages.weight_versions", "stages.stage")
PIPELINE = tuple(f"pipeline.{room}" for room in ("schedules", "distributed", "optimizer", "runtime", "data"))
TOPS = ("compression", "stages", "pipeline", "scripts", "conf")
# What a room may import of the package, beside itself and the version.
MAY_IMPORT = {
    "compression": (),
    "stages": LOW,
    "stages.tracing": LOW,
    "stages.memory": (*LOW, "stages.tracing"),
    "stages.weight_versions": (*LOW, "stages.memory"),
    "stages.stage": (*LOW, *STAGE),
    "stages.plan": (*LOW, *STAGE),
    "stages.profiling": (*LOW, *STAGE, "stages.plan"),
    "pipeline.schedules": (*LOW, *STAGE, "stages.plan", "stages.profiling"),
    "pipeline.distributed": (*LOW, "pipeline.schedules"),
    "pipeline.optimizer": (*LOW, *STAGE, "pipeline.distributed"),
    "pipeline.runtime": ("compression", "stages", *PIPELINE[:3]),
    "pipeline.data": LOW,
    "pipeline.data.cache": LOW,
    "pipeline.integrations": ("compression", "stages", "pipeline"),
    "pipeline.partition": ("compression", "stages", "pipeline.schedules"),
    "pipeline": ("compression", "stages", *PIPELINE, "pipeline.partition", "pipeline.pipeline"),
    "pipeline.run": ("compression", "stages", "pipeline", "conf"),
    "scripts": ("compression", "stages", "pipeline", "conf"),
    "conf": ("compression.errors", "compression.names"),
}


def refused(source: str, package: str) -> list[str]:
    """Imports of ``source``, a module in ``package``, against the rule, without ``penstock.``."""
    room = next(
        room for room in sorted(MAY_IMPORT, reverse=True) if f"{package}.".startswith(f"penstock.{room}.")
    )
    itself = () if room in ("stages", "pipeline") else (room,)
    allowed = ["__version__", *itself, *MAY_IMPORT[room]]
    wrong = []
    for name in names_in(ast.parse(source), package):
        top, _, rest = name.partition(".")
        if top in TOPS:
            wrong.append(f"{name} (write it as a relative import)")
        elif top == "penstock" and not any(f"{rest}.".startswith(f"{one}.") for one in allowed):
            if rest or not package.startswith("penstock.scripts."):  # run as files: they import penstock
                wrong.append(rest)
    return wrong


def code() -> list[Path]:
    return [file for file in files() if file.suffix == ".py" and file.parts[0] in TOPS]


def test_imports_go_down_the_floors_only() -> None:
    assert len(code()) > 20
    assert refused("from .tracing.graph import trace", "penstock.stages") == ["stages.tracing.graph.trace"]
    wrong = {str(file): refused((ROOT / file).read_text(), package_of(file)) for file in code()}
    assert {file: names for file, names in wrong.items() if names} == {}


def test_no_files_import_each_other_in_a_circle() -> None:
    """Whatever imports a file, at once, later or for its types, knows it."""
    leads = {file: imports_of(file) for file in code()}
    while leaves := {file for file, others in leads.items() if not others & leads.keys()}:
        leads = {file: others for file, others in leads.items() if file not in leaves}
    assert {str(file): sorted(map(str, others & leads.keys())) for file, others in leads.items()} == {}


def test_every_room_says_what_it_is_for() -> None:
    for room in (*MAY_IMPORT, "stages.tracing.capture"):
        assert ast.get_docstring(ast.parse((ROOT / room.replace(".", "/") / "__init__.py").read_text())), room


# Who names kinds of devices: what asks torch for them, what packs there, defaults of options, examples.
NAME_DEVICES = ("stages/device.py", "compression/", "scripts/bench/gpu", "conf/", "scripts/examples/")


def test_one_file_names_kinds_of_devices() -> None:
    named = {
        f"{file}:{one.lineno}"
        for file in code()
        if not str(file).startswith(NAME_DEVICES)
        for one in words(ast.parse((ROOT / file).read_text()))
        if one.value in ("cpu", "cuda") or str(one.value).startswith("cuda:")
    }
    assert named == set()
    assert next(words(ast.parse("torch.device('cuda')"))).value == "cuda"


def words(tree: ast.AST) -> Iterator[ast.Constant]:
    """The constants of a file, without the keys of its dictionaries."""
    keys = {id(key) for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys}
    return (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in keys)


def test_the_public_names_resolve() -> None:
    assert {"encode", "trace", "Pipeline", "init"} <= set(penstock.__all__) <= set(dir(penstock))
    assert "__version__" in dir(penstock)
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = penstock.no_such_name


def test_type_checkers_see_the_same_public_names() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == penstock._HOMES


def test_importing_the_package_and_its_help_load_no_torch() -> None:
    shown = "from penstock.scripts import command; command.run(['--help']); assert 'torch' not in sys.modules"
    assert "train" in run("-c", f"import sys, penstock, penstock.conf, gzip, bz2, lzma; {shown}")


def test_the_root_holds_the_package_and_its_command() -> None:
    assert sorted(path.name for path in ROOT.glob("*.py")) == ["__init__.py", "__main__.py"]


def test_the_folders_of_the_tests_are_those_of_the_code() -> None:
    # With an __init__.py, tests/compression/ would take the standard library's name on Python 3.14.
    ours = {file.parent for file in files() if file.parts[0] == "tests" and file.suffix == ".py"}
    rooms = {Path("tests", *room.split(".")[1:]) for room in packages()} - {Path("tests")}
    assert {folder.name for folder in ours - rooms} == {"tests", "support", "laws", "house", "bench"}
    assert not list((ROOT / "tests").rglob("__init__.py"))


def packages() -> list[str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return setup["options"]["packages"].split()


def test_packages_are_the_folders_on_disk() -> None:
    folders = {file.parent for file in files() if file.suffix == ".py" and file.parts[0] != "tests"}
    folders -= {*SCRIPTS}  # run as files, from a checkout
    assert sorted(packages()) == sorted(".".join(["penstock", *folder.parts]) for folder in folders)
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()] == []


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    copy = copy_to(tmp_path / "copy")
    # What a person may have lying about: none of it may enter.
    (copy / "runs").mkdir()
    for name in ("runs/model.py", "runs/config.yaml", "conf/notes.txt", "pipeline/data/data.npz"):
        (copy / name).write_text("")
    run(
        *("-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"),
        *("--wheel-dir", str(tmp_path)),
        cwd=copy,
    )
    (wheel,) = tmp_path.glob("penstock-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    folders = [Path(*name.split(".")[1:]) for name in packages()]
    data = {Path("py.typed"), *(Path("pipeline/data") / name for name in ("digits.npz", "digits.txt"))}
    wanted = {
        f"penstock/{file}"
        for file in files()
        if file in data
        or (file.suffix == ".py" and file.parent in folders)
        or (file.suffix == ".yaml" and file.parts[0] == "conf")
    }
    assert {name for name in held if ".dist-info/" not in name} == wanted
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in held)


def test_a_standard_library_with_a_package_called_compression(tmp_path: Path) -> None:
    # Python 3.14's gzip imports compression._common (PEP 784); before, only a made-up one shows the clash.
    (tmp_path / "compression" / "_common").mkdir(parents=True)
    (tmp_path / "compression" / "__init__.py").write_text("")
    (tmp_path / "compression" / "_common" / "__init__.py").write_text("")
    (tmp_path / "compression" / "_common" / "_streams.py").write_text("BUFFER_SIZE = 14")
    (tmp_path / "gzip.py").write_text(
        "from compression._common import _streams\nsize = _streams.BUFFER_SIZE\n"
    )
    program = f"""
import sys, sysconfig
for name in [name for name in sys.modules if name.partition(".")[0] in ("gzip", "compression")]:
    del sys.modules[name]
sys.path.insert(1, {str(tmp_path)!r})  # after the folder we start in, before the real library
sysconfig.get_path = lambda name: {{"stdlib": {str(tmp_path)!r}}}[name]
import gzip, compression
print(gzip.size, compression.__file__)
"""
    assert run("-c", program).split() == ["14", str(ROOT / "compression" / "__init__.py")]


# What may name torch.cuda: what has the device's methods, and the kernels of a GPU.
CUDA = "stages/device.py compression/gpu/*.py".split()


def names_cuda(source: str) -> bool:
    """True if code names torch.cuda, by an import or an attribute; torch.backends.cuda is not it."""
    tree = ast.parse(source)
    named = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return any(f"{name}.".startswith("torch.cuda.") for name in [*names_in(tree, ""), *named])


def test_only_the_device_and_the_kernels_of_a_gpu_name_torch_cuda() -> None:
    naming = [file for file in code() if file.parts[0] != "scripts" if names_cuda((ROOT / file).read_text())]
    assert [str(file) for file in naming if not any(file.match(pattern) for pattern in CUDA)] == []
    assert Path("stages/device.py") in naming
    assert not names_cuda("torch.backends.cuda.matmul; x.cuda; from torch.backends import cuda")
