"""Each file, option and test that docs/sources.md names is there."""

import dataclasses
import re

import pytest
from checkout import ROOT

from penstock.conf.schema import PlanningConfig, TrainConfig

COLUMNS = ("claim", "state", "file", "option", "test")
STATES = ("done", "in part: ", "not")
NUM_CLAIMS = {"A": 13, "B": 17, "C": 11, "D": 13, "E": 21}


def claims() -> list[tuple[str, dict[str, str]]]:
    """Return every claim, with the letter of its system."""
    found, system = [], ""
    for line in (ROOT / "docs" / "sources.md").read_text().splitlines():
        if line.startswith("## "):
            system = line[3] if line[4] == "." else ""
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and system and cells[1] != "state":
            found.append((system, dict(zip(COLUMNS, cells, strict=True))))
    return found


CLAIMS = claims()


def codes(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)


def field(name: str) -> bool:
    """Return whether ``name``, as it is typed, is an option of ``penstock train`` or ``penstock plan``."""
    for schema in (TrainConfig(), PlanningConfig()):
        found = schema
        for part in name.split("."):
            names = {one.name for one in dataclasses.fields(found)} if dataclasses.is_dataclass(found) else ()
            found = getattr(found, part) if part in names else None
            if part not in names:
                break
        else:
            return True
    return False


def test_every_claim_has_its_row_and_every_sum_is_right():
    text = (ROOT / "docs" / "sources.md").read_text()
    for system, number in NUM_CLAIMS.items():
        states = [row["state"] for one, row in CLAIMS if one == system]
        assert len(states) == number
        counts = [sum(state.startswith(one) for state in states) for one in STATES]
        assert f"| {system} | {' | '.join(map(str, counts))} | {number} |" in text
    assert field("memory.tier")
    assert field("graph")
    assert not field("memory.tiers")


@pytest.mark.parametrize(("system", "row"), CLAIMS, ids=[row["claim"] for _, row in CLAIMS])
def test_what_a_row_names_is_there(system, row):
    assert row["state"].startswith(STATES)
    assert row["file"] != "-" or row["state"].startswith("not")
    assert row["test"] != "-" or row["state"].startswith("not")
    assert [path for path in codes(row["file"]) if not (ROOT / path).is_file()] == []
    assert [option for option in codes(row["option"]) if not field(option.partition("=")[0])] == []
    for path, _, name in (test.partition("::") for test in codes(row["test"])):
        assert (ROOT / path).is_file(), path
        assert not name or re.search(rf"^def {name}\(", (ROOT / path).read_text(), flags=re.MULTILINE), name
