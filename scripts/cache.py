"""``penstock cache serve|status``: the cache of samples that the training jobs of a machine share.

It runs until it is told to end; training that uses it goes on without, and comes back when it does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..compression.errors import ConfigError
from ..pipeline.data.cache.wire import PAGE_BYTES, default_socket
from ..stages.files import reason
from ..stages.units import is_zero, parse_bytes, parse_duration, show_bytes
from .command_line import nearest

if TYPE_CHECKING:
    from rich.console import RenderableType

HELP = """\
penstock cache serve  [KEY=VALUE ...]
penstock cache status [KEY=VALUE ...]

serve keeps samples in memory for all training jobs of this user that run with cache=shared, until Ctrl-C.
  capacity=4GiB           memory for samples, all jobs together
  policy=next_use         which samples stay: next_use, gain or lru
  page=16KiB              a sample takes whole pages of this size; smaller ones suit small samples
  keep=0                  how long samples stay when no job reads them any more, like 10min (next_use, lru)
  warm_up=beside          first epochs of jobs: beside each other, or alone, in turn, for measurements (gain)
  last_gain=1             slots that the job with the longest epoch takes at once (gain); 0: a neighbour's

status shows the jobs: progress, hit rate, memory, predicted end.
  live=false              true: show it anew every second, until Ctrl-C

Both:
  socket=PATH             where the broker listens; default: penstock/cache.sock in XDG_RUNTIME_DIR, or in
                          the temporary folder cache.sock in a folder of your own"""

_WAIT_SECONDS = 5.0


def main(arguments: Sequence[str]) -> int:
    """Serve, or show, as ``arguments`` say; return the exit code."""
    if not arguments or arguments[0] not in COMMANDS:
        found = arguments[0] if arguments else "none"
        raise ConfigError(f"penstock cache takes {' or '.join(COMMANDS)}, found {found}")
    defaults, command = COMMANDS[arguments[0]]
    return command(_read(arguments[0], arguments[1:], defaults))


def serve(options: Mapping[str, str]) -> int:
    """Keep samples until a signal ends it."""
    capacity = parse_bytes(options["capacity"], name="capacity")
    page, least, most = parse_bytes(options["page"], name="page"), 512, 1 << 20
    if not least <= page <= most:
        limits = f"{show_bytes(least)} to {show_bytes(most)}"
        raise ConfigError(f"page={options['page']} does not fit: a page has {limits}")
    path, warm_up, last_gain = _socket(options), options["warm_up"], options["last_gain"]
    if warm_up not in ("beside", "alone"):
        raise ConfigError(f"warm_up={warm_up} does not fit: warm_up takes beside or alone")
    if not (last_gain.isdecimal() and len(last_gain) < 10):
        raise ConfigError(f"last_gain={last_gain} is no number of slots; write 0, 1, 2 ...")
    keep = 0.0 if is_zero(options["keep"]) else parse_duration(options["keep"], name="keep")
    from ..pipeline.data.cache.broker import serving
    from ..pipeline.data.cache.policies import policy as new_policy
    from ..pipeline.run import console

    policy = new_policy(options["policy"], capacity, keep=keep, last_gain=int(last_gain))
    with serving(path, policy, page_bytes=page, tell=console.warn, alone=warm_up == "alone"):
        held = f"{show_bytes(capacity)} for samples, policy={options['policy']}"
        print(f"{path}: {held}; Ctrl-C ends it", flush=True)
        try:
            while True:
                time.sleep(1.0)  # signal.pause() would miss a signal that comes just before it
        except KeyboardInterrupt:
            print("the cache is closed; jobs go on without it", flush=True)
    return 0


def status(options: Mapping[str, str]) -> int:
    """Show what the broker does, once or live."""
    if options["live"] not in ("true", "false"):
        raise ConfigError(f"live={options['live']} does not fit: live takes true or false")
    path = _socket(options)
    from ..pipeline.data.cache.client import state_of
    from ..pipeline.run import console

    def shown() -> RenderableType:
        try:
            return view(state_of(path, timeout=_WAIT_SECONDS))
        except TimeoutError:
            raise ConfigError(f"the broker at {path} does not answer; it was stopped, or hangs") from None
        except OSError as error:
            raise ConfigError(
                f"no broker listens at {path} ({reason(error)}); start one by penstock cache serve, or name "
                "its socket="
            ) from error

    screen = console.screen()
    if options["live"] == "false":
        screen.print(shown(), highlight=False)
        return 0
    from rich.live import Live

    try:
        with Live(shown(), console=screen, auto_refresh=False, screen=screen.is_terminal) as live:
            while True:
                time.sleep(1.0)
                live.update(shown(), refresh=True)
    except KeyboardInterrupt:
        return 0


def view(state: Mapping[str, Any]) -> RenderableType:
    """Return the cache as a line, and a row for each job."""
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table

    from ..pipeline.run.console import clock

    held, capacity = state["held_bytes"], state["capacity"]
    line = f"{show_bytes(held)} of {show_bytes(capacity)} held in {state['entries']} samples"
    line += f", {show_bytes(max(0, capacity - held))} in the pool"
    jobs = sorted(state["jobs"], key=lambda job: (job["job"], job["run"]))
    if not jobs:
        return Group(line, "no job is connected")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("job", overflow="fold")
    for name in ("data", "epoch", "done", "connections", "hits", "of all", "from cache", "holds", "ends in"):
        table.add_column(name, justify="right", no_wrap=name != "data", overflow="fold")
    for job in jobs:
        row = [escape(job["job"]), escape(job["data"]), f"{job['epoch'] + 1}/{job['epochs']}"]
        row += [f"{job['progress']:.0%}", str(job["connections"]), str(job["hits"])]
        row += [f"{job['hits'] / job['uses']:.1%}" if job["uses"] else "-", show_bytes(job["hit_bytes"])]
        ends = job["finish_seconds"]
        table.add_row(*row, show_bytes(job["held_bytes"]), "-" if ends is None else clock(ends))
    return Group(line, table)


SERVE = {"capacity": "4GiB", "policy": "next_use", "page": str(PAGE_BYTES), "keep": "0", "warm_up": "beside"}
COMMANDS: dict[str, tuple[dict[str, str], Callable[[Mapping[str, str]], int]]] = {
    "serve": ({**SERVE, "last_gain": "1", "socket": ""}, serve),
    "status": ({"live": "false", "socket": ""}, status),
}


def _read(command: str, words: Sequence[str], defaults: Mapping[str, str]) -> dict[str, str]:
    options = dict(defaults)
    for word in words:
        name, equals, value = word.partition("=")
        if name not in options:
            meant, known = nearest(name, options), ", ".join(f"{one}=" for one in options)
            hint = f"did you mean {meant}=?" if meant else f"known are {known}"
            raise ConfigError(f"penstock cache {command} has no option {word}; {hint}")
        if not equals or not value:
            raise ConfigError(f"{word} has no value; write {name}={defaults[name] or 'PATH'}")
        options[name] = value
    return options


def _socket(options: Mapping[str, str]) -> Path:
    return Path(options["socket"] or default_socket(os.environ.get("XDG_RUNTIME_DIR"))).absolute()
