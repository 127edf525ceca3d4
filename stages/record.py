"""Plain JSON data read strictly into frozen dataclasses.

Every field must be there that has no default (a file may be older than the field), nothing else may be, every
value has its type; a PlanError says where that does not hold. It is data, never code (law L9).
"""

import dataclasses
import functools
import json
import math
import types
import typing
from pathlib import Path
from typing import Any

from ..compression.errors import PlanError

IN_PROCESS = {"json": False}
"""Metadata of a field with the default None that an object has in this process alone: no part of its JSON."""


def reduced(record: Any) -> tuple[Any, ...]:
    """Return the ``__reduce__`` of a record, which is pickled without the fields of this process."""
    kept = {field.name: getattr(record, field.name) for field in _json_fields(type(record))}
    return functools.partial(type(record), **kept), ()


def _json_fields(kind: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if field.metadata.get("json", True)]


def json_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON data, which ``read`` takes."""
    names = {field.name for field in _json_fields(record)}
    absent = {field.name: None for field in dataclasses.fields(record) if field.name not in names}
    data = dataclasses.asdict(dataclasses.replace(record, **absent))
    return {name: data[name] for name in data if name in names}


def load_json(path: str | Path, kind: str) -> Any:
    """The JSON value in a file; raises PlanError if the file is missing, no JSON, or nested beyond reason."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"cannot read the {kind} {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"a {kind} is a JSON file, {path} is not: {error}") from error


def read(kind: Any, value: Any, where: str) -> Any:
    """Read ``value`` as ``kind``: int, finite float, str, a tuple, dict, optional or dataclass of these;
    raises PlanError, which says ``where``."""
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        flag = type(value) in {bool, types.NoneType}.intersection(arguments)
        return value if flag else read(arguments[0], value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(read(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        key_of = _whole if arguments[0] is int else lambda key, _: key
        return {
            key_of(key, where): read(arguments[1], item, f"{where}[{key}]") for key, item in value.items()
        }
    if kind is float and type(value) is int and abs(value) <= 2**53:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        name = {tuple: "list", dict: "object"}.get(origin) or kind.__name__
        raise PlanError(f"{where} is of type {name}, found {shortened(value)}")
    return value


def _whole(key: str, where: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise PlanError(f"the keys of {where} are whole numbers, found {shortened(key)}")
    return int(key)


def _read_fields(kind: Any, value: Any, where: str) -> Any:
    hints, fields = typing.get_type_hints(kind), _json_fields(kind)
    names = [field.name for field in fields]
    needed = [f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING]
    if not isinstance(value, dict):
        raise PlanError(f"{where} is an object with the keys {', '.join(names)}, found {shortened(value)}")
    if missing := [name for name in needed if name not in value]:
        raise PlanError(f"{where} lacks the key {missing[0]}")
    if unknown := [name for name in value if name not in names]:
        raise PlanError(
            f"{where} has the unknown key {shortened(unknown[0])}; the known ones are {', '.join(names)}"
        )
    return kind(**{name: read(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def shortened(value: Any) -> str:
    """A value in at most sixty characters, as JSON as far as it can be, for an error's sentence."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else f"{text[:57]}..."
