"""Command lines: flags parted from options, misspelt ones named, and the text of ``--help``.

Hydra answers a flag it does not know with its whole usage; here it is one sentence, before Hydra composes."""

import argparse
import dataclasses
import difflib
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..compression.errors import ConfigError
from ..conf import groups

RENAMED = {"guard": "detect_anomaly"}  # options by their old names
SECTIONS: dict[str, tuple[str, ...]] = {
    "model": ("model", "loss"),
    "data": ("data", "batch_size", "cache"),
    "training": (
        "optimizer", "scheduler", "clip", "autocast", "loss_scale", "epochs", "max_steps", "eval", "nan",
        "detect_anomaly", "seed", "deterministic",
    ),
    "pipeline": (
        "ranks", "stages", "cuts", "schedule", "program", "micro_batches", "extra_in_flight", "weights",
        "prediction", "error_feedback", "weights_first", "recompute", "link", "cluster", "plan",
        "profile", "graph",
    ),
    "compression": ("codec",),
    "memory": ("memory",),
    "replicas": ("replicas",),
    "run": (),  # all others
}  # fmt: skip
"""Sections of the help, and the options in them."""

NOT_TYPED = ("_target_", "versions", "settings", "hydra")  # what is not offered
FOOT = """\
Hydra:
  hydra.run.dir=PATH        where the run is kept; default: runs/<date>_<time>-<process>
  --multirun KEY=A,B        one run for each value
  --cfg job                 print the whole configuration and stop
  --hydra-help              everything else that Hydra offers"""
EXAMPLES = {
    "train": """\
Examples:
  penstock train model=gpt data=text ranks=3 micro_batches=16
  penstock train model=resnet50 optimizer=adam optimizer.lr=1e-3 data=image_folder data.root=PATH
  penstock train model._target_=my.Net data._target_=my.data loss._target_=my.loss
  penstock train checkpoint.every=100 hydra.run.dir=runs/mine resume=auto""",
    "plan": """\
Examples:
  penstock plan model=resnet50 ranks=4 link=1Gbit memory.device=2GiB
  penstock plan model=gpt data=text ranks=3 schedule=all""",
}


def parse(command: str, arguments: Sequence[str], schema: type[Any]) -> argparse.Namespace:
    """Part the words of a command line into Hydra's flags and, as ``overrides``, options."""
    from hydra._internal.utils import get_args_parser  # takes a tenth of a second

    parser, known = get_args_parser(), names(schema)
    parser.allow_abbrev = parser.exit_on_error = False
    try:
        typed, unknown = parser.parse_known_intermixed_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}") from error
    if word := next((word for word in unknown if word.startswith("-")), ""):
        after = [*arguments, ""][list(arguments).index(word) + 1]
        flag, equals, value = word.partition("=")
        raise ConfigError(_unknown_flag(command, flag, value if equals else after, known))
    typed.overrides += unknown
    for word, value in pairwise(typed.overrides):
        if "=" not in word and "=" not in value and (name := nearest(word, known)):
            raise ConfigError(f"{word} {value} are two words; options are one: {name}={value}")
    folders = [folder for folder in (typed.config_dir, typed.config_path) if folder]
    overrides = [option for word in typed.overrides for option in with_named_target(word, folders)]
    typed.overrides = with_own_groups(overrides)
    typed.config_name = typed.config_name or command
    return typed


def _unknown_flag(command: str, flag: str, value: str, known: Sequence[str]) -> str:
    value = "" if "=" in value or value.startswith("--") else value
    if meant := nearest(flag, known):
        shown = f"{flag} {value}".strip()
        return f"{shown} is written {meant}={value or 'VALUE'} here: options are KEY=VALUE, without dashes"
    example = f"options are KEY=VALUE, for example ranks=2, and penstock {command} --help lists them"
    flags = ("--help", "--multirun", "--cfg", "--config-dir", "--config-name")
    close = difflib.get_close_matches(flag, flags, n=1, cutoff=0.7)
    return f"there is no flag {flag}; {f'did you mean {close[0]}?' if close else example}"


def with_named_target(argument: str, folders: Sequence[str] = ()) -> list[str]:
    """Return the option so that ``optimizer=adam`` is torch's Adam and ``model=resnet50`` is torchvision's.

    A file in ``folders``, configurations of one's own, goes before a name of torch."""
    group, _, typed = argument.partition("=")
    module = groups.OF_TORCH.get(group)
    if not typed or not (module or group == "model"):
        return [argument]
    files = {file.stem for folder in folders for file in Path(folder, group).glob("*.yaml")}
    files |= {*groups.choices(group), "null"}
    if typed in files or typed.lower() in files:
        return [argument if typed in files else f"{group}={typed.lower()}"]
    names = typed.split(",")  # several are for --multirun
    if not all(re.fullmatch(r"[A-Za-z]\w*", name) and name not in files for name in names):
        return [argument]
    if group == "model":
        return ["model=torchvision", f"model.name={typed}"]
    return [f"{group}._target_={','.join(f'{module}.{name.lower()}' for name in names)}"]


def with_own_groups(arguments: Sequence[str]) -> list[str]:
    """Return the options so that ``model._target_=my.Net`` starts from ``model=own``, not from our default.

    Options of one's own (``model.width=3``) are new keys to Hydra, so they are added rather than looked for.
    """
    arguments = [re.sub(r"^(\+*)cache=", r"\1cache.mode=", argument) for argument in arguments]
    typed = [argument.partition("=")[0] for argument in arguments]
    targets = (re.fullmatch(r"\+*(\w+)\._target_", key) for key in typed)
    own = {target[1] for target in targets if target}

    def added(argument: str) -> str:
        group, dot, rest = argument.partition("=")[0].partition(".")
        return f"++{argument}" if dot and group in own and rest != "_target_" else argument

    chosen = [f"{group}=own" for group in sorted(own) if group not in typed]
    return chosen + [added(argument) for argument in arguments]


def names(schema: type[Any], prefix: str = "") -> list[str]:
    """Options of a command by their full dotted names, those of all choices of its groups included."""
    known: list[str] = []
    for one in dataclasses.fields(schema):
        default = getattr(schema(), one.name)
        known.append(f"{prefix}{one.name}")
        if dataclasses.is_dataclass(default):
            known += names(type(default), f"{prefix}{one.name}.")
        for options in groups.listed(one.name).values():
            known += [f"{one.name}.{key}" for key in options]
    return list(dict.fromkeys(known))


def nearest(word: str, known: Iterable[str]) -> str:
    """Option that was meant: by an old name, spelt otherwise, without its group, or mistyped; "" for none."""
    known, word = list(known), RENAMED.get(word, word).lstrip("-").lower().replace("-", "_")
    if word in known:
        return word
    group, _, leaf = word.rpartition(".")
    same = [name for name in known if not group and name.endswith(f".{word}")]
    alike = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == group}
    close = difflib.get_close_matches(leaf, alike, n=1, cutoff=0.7) if len(leaf) > 2 else []
    return next(iter([*same, *map(alike.__getitem__, close)]), "")


def unknown_option(full: str, known: Iterable[str], schema: type[Any]) -> str:
    """Sentence about a key, by its full dotted name, that is not among the ``known`` ones of its group."""
    group = full.rpartition(".")[0]
    known = sorted(f"{group}.{name}" if group else name for name in known if name not in NOT_TYPED)
    if close := nearest(full, known if group else names(schema)):
        return f"there is no option {full}; did you mean {close}?"
    remedy = f"known are {', '.join(known)}" if known else f"{group} has none"
    return f"there is no option {full}; {remedy}"


def find_own_modules() -> None:
    """Let modules of the working folder be found: where ``model._target_=my.Net`` usually is."""
    try:
        here = os.getcwd()
    except FileNotFoundError as error:
        raise ConfigError("a run needs a working folder, and this one was removed; go to another") from error
    if here not in sys.path:
        sys.path.append(here)


def asks_for_help(arguments: Sequence[str]) -> bool:
    """True if help was asked for."""
    return any(argument in ("-h", "--help") for argument in arguments) or list(arguments) == ["help"]


def help_text(command: str, schema: type[Any]) -> str:
    """Help of a command whose options are the dataclass ``schema``: from its docstrings and the groups."""
    whole: Any = {"break_long_words": False, "break_on_hyphens": False}
    wrap = textwrap.TextWrapper(118, subsequent_indent=28 * " ", **whole)
    parts = [f"penstock {command} [KEY=VALUE ...]"]
    left = {one.name: getattr(schema(), one.name) for one in dataclasses.fields(schema)}
    meaning = meanings(schema)
    for section, fields in SECTIONS.items():
        names = [name for name in fields or list(left) if name in left]
        rows = [row for name in names for row in _rows(name, left.pop(name), meaning[name])]
        parts.append("\n".join([f"{section.capitalize()}:", *(wrap.fill(f"  {a:<25} {b}") for a, b in rows)]))
    return "\n\n".join([*parts, FOOT, EXAMPLES[command]])


def meanings(schema: type[Any]) -> dict[str, str]:
    """Attributes of a dataclass and its bases, with their docstrings' text."""
    lines: dict[str, str] = {}
    for one in reversed(schema.__mro__):
        attributes = (one.__doc__ or "").partition("Attributes:\n")[2]
        found = re.findall(r"^ {8}(\w+): (.+(?:\n {9,}\S.*)*)", attributes, flags=re.MULTILINE)
        lines |= {name: " ".join(text.split()) for name, text in found}
    return lines


def _rows(name: str, default: Any, meaning: str) -> Iterator[tuple[str, str]]:
    """Yield each option that ``name`` stands for, and its meaning."""
    if dataclasses.is_dataclass(default):
        found = meanings(type(default))
        for one in dataclasses.fields(default):
            yield from _rows(f"{name}.{one.name}", getattr(default, one.name), found[one.name])
    elif files := groups.files(name):
        place = {"model": "torchvision.models", **groups.OF_TORCH}.get(name)
        yield f"{name}=NAME", meaning + (f"; or a name of {place}" if place else "")
        common = groups.OF_THE_RUN.get(name, {})
        for choice, options in files.items():
            own = {key: value for key, value in options.items() if key not in {"_target_", *common}}
            yield f"  {name}={choice}", " ".join(f"{name}.{key}={_shown(own[key])}" for key in own)
        options = next(iter(files.values()))
        yield from ((f"{name}.{key}={_shown(options[key])}", text) for key, text in common.items())
    elif not isinstance(default, dict):
        yield f"{name}={_shown(default)}", meaning


def _shown(value: Any) -> str:
    """Return a default as it is typed."""
    if isinstance(value, str):
        return "VALUE" if value == "???" else value
    return json.dumps(value, separators=(",", ":"))
