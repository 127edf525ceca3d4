"""The ``penstock`` command: finds the sub-command, and turns a refusal into one sentence and an exit code.

Nothing heavy is imported before a sub-command is chosen, so that help appears at once."""

import importlib
import os
import signal
import sys

from .. import __version__
from ..compression.errors import PenstockError
from ..pipeline.distributed.launcher import Launched, end
from . import stopping

COMMANDS = ("train", "plan", "export", "diff", "replay", "audit", "cache")
USAGE = """\
penstock COMMAND [KEY=VALUE ...]

  penstock train   train a network across pipeline stages
  penstock plan    show how a network would be cut, and save the plan
  penstock export  write the model of a checkpoint
  penstock diff    find the first step and layers at which two runs differ
  penstock replay  repeat a step of a run, on any cut, and look at what is in it
  penstock audit   repeat steps drawn at random, to find a machine that computes wrongly
  penstock cache   keep samples in memory for all jobs of this machine, and show who uses them

penstock COMMAND --help lists the options of a command."""
REFUSED = 2
STOPPED = 128


def main() -> None:
    """Run the command line and leave with its exit code."""
    stopping.listen()
    code = run(sys.argv[1:])
    if "RANK" in os.environ or code > STOPPED:  # a thread may be writing what nobody waits for
        end(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run ``arguments`` as typed; return 0, 2 when something is refused, 128 + its number for a signal."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0 if arguments else REFUSED
    if arguments[0] == "--version":
        print(f"penstock {__version__}")
        return 0
    name, *rest = arguments
    try:
        if name not in COMMANDS:
            raise PenstockError(f"{name} is not a command; known are {', '.join(COMMANDS)}")
        launched = Launched.of_environment()
        if launched and launched.rank and name != "train":
            return 0  # one process is enough, and rank 0 is one
        from .command_line import asks_for_help, help_text

        command = importlib.import_module(f".{name}", __package__)
        if asks_for_help(rest) or (name == "cache" and asks_for_help(rest[1:])):
            if not (launched and launched.rank):
                print(command.HELP if hasattr(command, "HELP") else help_text(name, command.SCHEMA))
            return 0
        return command.main(rest)
    except (PenstockError, ImportError) as error:
        refusal = unloadable(error) if isinstance(error, ImportError) else error
        print(f"penstock: {' '.join(str(refusal).split())}", file=sys.stderr)
        return REFUSED
    except BrokenPipeError:  # whoever read what this prints has ended, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return STOPPED + signal.SIGPIPE
    except KeyboardInterrupt as stop:
        if not os.environ.get("RANK", "0").strip("0"):  # of a launcher's ranks the first one tells
            print(f"penstock: {stopping.sentence(stop)}", file=sys.stderr)
        return STOPPED + stopping.number(stop)


def unloadable(error: ImportError) -> PenstockError:
    """Return a sentence about a library that does not load, as under a limit of memory."""
    remedy = "raise the limit of the memory of a process (ulimit -v), or install it anew"
    return PenstockError(f"a library cannot be loaded: {error}; {remedy}")


if __name__ == "__main__":
    main()
