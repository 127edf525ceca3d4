"""A network as a list of layers: modules of ``torch.nn`` by name, their arguments, and what each reads.

It is traced like any other model, so ``penstock plan graph=true`` draws it. A file holds it as YAML:

    inputs: [image]                                   # optional; a network has one input named "input"
    layers:
      - {name: conv, type: Conv2d, arguments: {in_channels: 3, out_channels: 8, kernel_size: 3, padding: 1}}
      - {name: bent, type: ReLU}                      # reads the layer before it
      - {name: sum, type: add, reads: [conv, bent]}   # add, mul and cat join several values
      - {name: flat, type: Flatten}
      - {name: head, type: Linear, arguments: {in_features: 6272, out_features: num_classes}}
"""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from ..compression.errors import ConfigError

KEYS = ("name", "type", "arguments", "reads")


class _Join(nn.Module):
    """A function of several values as a layer, so that it has a name to cut at."""

    def __init__(self, join: Callable[..., Any], **arguments: Any) -> None:
        super().__init__()
        self._join, self._arguments = join, arguments

    def forward(self, *values: Any) -> Any:
        return self._join(values, **self._arguments)


JOINS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "add": (partial(reduce, torch.add), set()),
    "mul": (partial(reduce, torch.mul), set()),
    "cat": (torch.cat, {"dim"}),
}
"""Functions of several values, with the arguments that each takes."""


class DefinedNetwork(nn.Module):
    """The network of a list of layers; the last layer's value is its output."""

    def __init__(self, steps: Sequence[tuple[str, Sequence[str], nn.Module]], inputs: Sequence[str]) -> None:
        """Take steps of (name, reads, module), each after those that it reads."""
        super().__init__()
        for name, _, module in steps:
            self.add_module(name, module)
        self._inputs = tuple(inputs)
        self._steps = tuple((name, tuple(map(_source, reads))) for name, reads, _ in steps)
        last = {source: name for name, sources in self._steps for source, _ in sources}
        self._freed = {
            name: tuple(s for s, reader in last.items() if reader == name) for name in last.values()
        }

    def forward(self, *inputs: Any) -> Any:
        """Return the value of the last layer; ``inputs`` come in the order of the definition."""
        if len(inputs) != len(self._inputs):
            raise TypeError(f"the inputs are {', '.join(self._inputs)}, found {len(inputs)} values")
        values = dict(zip(self._inputs, inputs, strict=True))
        for name, sources in self._steps:
            read = [values[source] if item is None else values[source][item] for source, item in sources]
            values[name] = getattr(self, name)(*read)
            for source in self._freed.get(name, ()):
                del values[source]
        return values[self._steps[-1][0]]


def from_layers(
    layers: Sequence[Mapping[str, Any]], *, inputs: Sequence[str] = ("input",), num_classes: int | None = None
) -> nn.Module:
    """Return the network that a list of layers defines.

    Args:
        layers: mappings with ``name`` (as in ``cuts=``), ``type`` (a class of ``torch.nn``, or add, mul,
            cat), ``arguments`` of the class by name (optional), and ``reads``: names of inputs and earlier
            layers, by default the layer before; ``name.1`` reads the second of several outputs.
        inputs: names of what the network is called with, in order.
        num_classes: the value of an argument that is the word ``num_classes``.

    Raises:
        ConfigError: a layer is incomplete, unknown, reads what is not there, or is read by nobody.
    """
    if not isinstance(layers, Sequence) or isinstance(layers, str) or not layers:
        raise ConfigError(f"layers is a list of layers, found {layers!r:.60}; write one mapping per layer")
    known: list[str] = []
    for name in inputs:
        _check_name(name, "an input", known)
        known.append(name)
    steps, unread = [], dict.fromkeys(inputs, "input")
    for number, layer in enumerate(layers):
        name, reads, module = _step(number, layer, known, num_classes)
        for read in reads:
            unread.pop(_source(read)[0], None)
        steps.append((name, reads, module))
        known.append(name)
        unread[name] = "layer"
    unread.pop(known[-1])
    for name, kind in unread.items():
        raise ConfigError(f"{kind} {name} is read by no layer, and is not the last; read it, or leave it out")
    try:
        return DefinedNetwork(steps, inputs)
    except KeyError as error:  # torch's, of a name such as forward
        raise ConfigError(f"a layer is named as a part of torch.nn.Module ({error}); rename it") from error


def network(*, file: str, num_classes: int | None = None) -> nn.Module:
    """Return the network that a YAML file defines (``model=layers model.file=FILE``); raises ConfigError."""
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"model.file={file} cannot be read ({reason}); name a YAML file of layers"
        ) from error
    except yaml.YAMLError as error:
        text = " ".join(str(error).split())
        raise ConfigError(f"model.file={file} is no YAML ({text}); mend that line") from error
    if not isinstance(content, dict) or not {"layers"} <= content.keys() <= {"layers", "inputs"}:
        found = list(content) if isinstance(content, dict) else content
        raise ConfigError(
            f"model.file={file} has the keys layers and, if you like, inputs; found {found!r:.40}"
        )
    inputs = content.get("inputs", ["input"])
    if not isinstance(inputs, list) or not inputs:
        raise ConfigError(f"model.file={file}: inputs is a list of names, found {inputs!r:.40}")
    try:
        return from_layers(content["layers"], inputs=inputs, num_classes=num_classes)
    except ConfigError as error:
        raise ConfigError(f"model.file={file}: {error}") from error


def _step(
    number: int, layer: object, known: Sequence[str], num_classes: int | None
) -> tuple[str, list[str], nn.Module]:
    """Return name, reads and module of one layer; ``known``: names of inputs and of the layers before it."""
    if not isinstance(layer, Mapping) or not {"name", "type"} <= layer.keys():
        raise ConfigError(f"layer {number + 1} has a name and a type, found {layer!r:.60}; write both")
    name = layer["name"]
    for key in layer:
        if key not in KEYS:
            raise ConfigError(f"layer {name} has no key {key}; known are {', '.join(KEYS)}")
    _check_name(name, f"layer {number + 1}", known)
    reads = layer.get("reads", [known[-1]] if number else list(known))
    if not isinstance(reads, list) or not reads:
        raise ConfigError(
            f"reads of layer {name} is a list of names, found {reads!r:.40}; write [{known[-1]}]"
        )
    for read in reads:
        if not isinstance(read, str) or _source(read)[0] not in known:
            near = get_close_matches(str(read), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise ConfigError(f"layer {name} reads {read}, which is no input and no layer before it; {hint}")
    arguments = layer.get("arguments") or {}
    if not isinstance(arguments, Mapping):
        raise ConfigError(
            f"arguments of layer {name} is a mapping, found {arguments!r:.40}; write {{KEY: VALUE}}"
        )
    given = {}
    for key, value in arguments.items():
        if value == "num_classes":
            if num_classes is None:
                rule = f"{key} of layer {name} is num_classes, which is not known"
                raise ConfigError(f"{rule}; write the number")
            value = num_classes
        given[key] = tuple(value) if isinstance(value, list) else value
    return name, reads, _module(name, layer["type"], given)


def _module(name: str, kind: object, arguments: dict[str, Any]) -> nn.Module:
    if str(kind) in JOINS:
        join, takes = JOINS[str(kind)]
        if unknown := arguments.keys() - takes:
            listed = ", ".join(takes) or "none"
            raise ConfigError(
                f"{kind} of layer {name} has no argument {min(unknown, key=str)}; it takes {listed}"
            )
        return _Join(join, **arguments)
    cls = getattr(nn, str(kind), None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)) or cls is nn.Module:
        known = {one.lower(): one for one in (*vars(nn), *JOINS)}
        near = get_close_matches(str(kind).lower(), known, 1)
        other = f"use a class of torch.nn, or {', '.join(JOINS)}"
        hint = f"did you mean {known[near[0]]}?" if near else other
        raise ConfigError(f"type of layer {name} is no class of torch.nn, found {kind}; {hint}")
    try:
        return cls(**arguments)
    except (TypeError, ValueError, RuntimeError, AssertionError, AttributeError) as error:
        reason = f"{error}".partition("\n")[0].replace(f"{cls.__name__}.__init__() ", "")
        raise ConfigError(f"{kind} of layer {name} refuses its arguments: {reason}") from error


def _check_name(name: object, what: str, known: Sequence[str]) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"the name of {what} has letters, digits and _, found {name!r:.40}; rename it")
    if name in known:
        raise ConfigError(f"two have the name {name}; rename one")


def _source(read: str) -> tuple[str, int | None]:
    """Return the name that is read and, of ``name.1``, the number of the output."""
    name, _, item = read.partition(".")
    return (name, int(item)) if item.isdecimal() else (read, None)
