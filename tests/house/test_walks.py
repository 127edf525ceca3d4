"""The walks of docs/architecture.md: which calls lie between the loop over a program and the work itself."""

import contextlib
import re
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from cases import Case, pipeline_with_batches
from checkout import ROOT
from torch import nn

import penstock
from penstock.compression.registry import CODECS
from penstock.compression.zero_value import pack_masked
from penstock.pipeline.runtime.engine import Engine

LOOP = Engine.step.__code__
OURS = Path(penstock.__file__).parent
LAYER = nn.Linear.forward.__code__
PACKS = {pack_masked.__code__, *(type(codec).pack.__code__ for codec in CODECS.values())}
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def walk_to(goal: str) -> list[tuple[str, str]]:
    """(file, name) of every call that the page says leads to ``goal``, without loop and goal."""
    (text,) = re.findall(rf"```\nloop \S+ -> {goal}\n(.*?)\n```", PAGE, re.DOTALL)
    return [(file, name) for name, file in re.findall(r"-> (\S+) \((\S+)\)", text)]


def above(frame: FrameType | None) -> tuple[CodeType, ...] | None:
    """Our calls between the loop and ``frame``, the outermost first; None outside of a step's loop."""
    found = []
    while frame is not None and frame.f_code is not LOOP:
        if frame.f_code.co_filename.startswith(str(OURS)):
            found.append(frame.f_code)
        frame = frame.f_back
    return None if frame is None else tuple(found[::-1])


def ways_of_a_step(codec: str) -> tuple[set[tuple[CodeType, ...]], set[tuple[CodeType, ...]]]:
    """The ways from a step to its layers, and the ``pack`` of its codec."""
    case = Case(model="mlp", cuts=2, micro_batches=2, codec=codec)
    pipe, batches = pipeline_with_batches(case)
    layers, packs = set(), set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (frame.f_code is LAYER or frame.f_code in PACKS):
            way = above(frame.f_back)
            if way is not None and not PACKS.intersection(way):  # a codec may ask another one
                (layers if frame.f_code is LAYER else packs).add(way)

    with contextlib.closing(pipe):
        pipe.step(*batches[0])
        sys.setprofile(note)
        try:
            pipe.step(*batches[1])
        finally:
            sys.setprofile(None)
    return layers, packs


@pytest.mark.parametrize("codec", ["raw", "zero_value", "exponent"])
def test_the_walks_to_a_layer_and_to_a_kernel_are_those_of_the_page(codec: str) -> None:
    layers, packs = ways_of_a_step(codec)
    assert len(layers) == 1
    assert len(packs) == 2, "of values, and of gradients"
    for ways, goal in ((layers, "layer"), (packs, "pack")):
        said = walk_to(goal)
        for way in ways:
            assert len(way) == len(said)
            for code, (file, name) in zip(way, said, strict=True):
                assert Path(code.co_filename).relative_to(OURS) == Path(file)
                assert code.co_qualname in (name, name.replace("_forward", "_backward"))


def test_the_walks_are_short() -> None:
    assert len(walk_to("layer")) <= 3
    assert len([*walk_to("pack"), "pack"]) <= 5
