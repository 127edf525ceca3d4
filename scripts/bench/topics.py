"""``penstock bench TOPIC``: finds the topic; its file measures, prints and writes ``results.json``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...compression.errors import ConfigError
from ...conf.bench import BenchPipelineConfig
from ...conf.bench_codecs import BenchCodecsConfig
from ...conf.convergence import BenchConvergenceConfig
from ...pipeline.run.run_folder import RunFolder
from .. import usage
from . import refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One subject: its options, what refuses some of them before torch is imported, and the file for each."""

    schema: type[Any]
    early: Callable[[Any, Sequence[str]], None]
    home: Callable[[Any], str]


TOPICS = {
    "codecs": Topic(schema=BenchCodecsConfig, early=refusals.codecs, home=lambda config: "codecs_bench"),
    "convergence": Topic(
        schema=BenchConvergenceConfig, early=refusals.convergence, home=lambda config: "convergence"
    ),
    "pipeline": Topic(
        schema=BenchPipelineConfig,
        early=refusals.pipeline,
        home=lambda config: "link_race" if config.schedule == "1f1b" else "schedules",
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Run the topic that ``arguments`` begins with; return the exit code.

    Raises: ConfigError: there is no such topic, or an option of it does not fit.
    """
    name, known = (*arguments[:1], None)[0], ", ".join(TOPICS)
    if usage.wanted(arguments[:1]):
        print(f"penstock bench TOPIC [KEY=VALUE ...]\n\nTOPIC, each with a --help: {known}")
        return 0
    if name not in TOPICS:
        named = name and not name.startswith("-")
        found = f"{name} is no topic of penstock bench" if named else "penstock bench needs a topic first"
        raise ConfigError(f"{found}; known are {known}")
    topic, rest, typed = TOPICS[name], arguments[1:], f"bench {name}"
    if usage.wanted(rest):
        print(usage.text(typed, topic.schema))
        return 0
    from ..application import run

    def task(config: Any, folder: RunFolder, options: Sequence[str]) -> None:
        importlib.import_module(f".{topic.home(config)}", __package__).bench(config, folder, options)

    return run(f"bench_{name}", topic.schema, task, arguments=rest, early=topic.early, command=typed)
