"""The list of mutants: files that are there, and faults whose text stands once in its file."""

import yaml
from checkout import ROOT

KNOWN = yaml.safe_load((ROOT / "scripts" / "mutants.yaml").read_text())


def test_every_subject_is_there_and_every_fault_names_a_text_that_its_file_has_once():
    subjects = [ROOT / file for files in KNOWN["subjects"].values() for file in files]
    assert [file for file in subjects if not file.is_file()] == []
    texts = [(ROOT / fault["file"], fault["old"]) for fault in KNOWN["planted"]]
    assert [(file.name, old) for file, old in texts if file.read_text().count(old) != 1] == []
