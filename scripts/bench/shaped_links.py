"""Links of a known speed between two ranks of this machine: network namespaces, a veth pair, a token bucket.

A speed that is only computed would leave out what slow links really do to a schedule. The namespaces belong
to two processes that do nothing else and end with this one, however it ends, so nothing is ever left behind.

Source: tc-tbf(8), unshare(1), veth(4), linux/ethtool.h (SIOCETHTOOL)."""

from __future__ import annotations

import array
import contextlib
import os
import shlex
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.compression.errors import PenstockError, TransportError
from penstock.stages.units import parse_bytes, parse_rate

LOOPBACK = "loopback"
DEVICE = "penstock0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LATENCY_MS = 400
"""The longest a packet may wait in the bucket before it is dropped."""

TOOLS = ("unshare", "nsenter", "ip", "tc")
_QUEUE_PACKETS = 100_000  # netem drops what is in flight beyond this; its default of 1000 is 1.5 MB
_SIOCETHTOOL = 0x8946
_READ_AND_WRITE = {"tso": (0x1E, 0x1F), "gso": (0x23, 0x24), "gro": (0x2B, 0x2C)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Link between two ranks; without a rate it is the loopback device, which nobody shapes.

    Attributes:
        name: as it was typed.
        rate: bits per second in each direction. burst: bytes in the bucket. delay: ms in each direction.
    """

    name: str
    rate: float | None = None
    burst: int = 0
    delay: float = 0.0

    @property
    def device(self) -> str:
        """The network device of either rank."""
        return "lo" if self.rate is None else DEVICE


def parse_link(value: Any, *, burst: Any = "64KiB", delay: float = 0.0) -> Link:
    """Return the link that ``links=[...]`` names: ``loopback`` or a rate such as ``100Mbit``.

    Raises: PlanError: it is neither.
    """
    if value == LOOPBACK:
        return Link(name=LOOPBACK)
    rate = parse_rate(value, name="links")
    return Link(name=str(value), rate=rate, burst=parse_bytes(burst, name="burst"), delay=delay)


def inside(holder: int, *, user: bool) -> list[str]:
    """The command that runs another one in the network namespace of the process ``holder``."""
    credentials = ["--user", "--preserve-credentials"] if user else []
    return ["nsenter", "--target", str(holder), *credentials, "--net"]


def setup(link: Link, holders: tuple[int, int], *, user: bool) -> list[list[str]]:
    """The commands that join the namespaces of two processes by ``link``, in order.

    Args: user: the namespaces belong to a user namespace, for people who are not root.
    """
    assert link.rate is not None, "the loopback device is not set up"
    first, second = (inside(holder, user=user) for holder in holders)
    commands = [[*first, *f"ip link add {DEVICE} type veth peer name {DEVICE} netns {holders[1]}".split()]]
    bucket = f"tbf rate {round(link.rate)}bit burst {link.burst}b latency {LATENCY_MS}ms"
    # Packets pass the delay and then the bucket: tc-netem(8), "Rate control".
    delayed = f"root handle 1: netem delay {link.delay:g}ms limit {_QUEUE_PACKETS}"
    queues = [delayed, f"parent 1:1 handle 2: {bucket}"] if link.delay else [f"root {bucket}"]
    for end, address in zip((first, second), ADDRESSES, strict=True):
        lines = [f"ip address add {address}/24 dev {DEVICE}", "ip link set lo up", f"ip link set {DEVICE} up"]
        lines += [f"tc qdisc add dev {DEVICE} {queue}" for queue in queues]
        commands += [[*end, *line.split()] for line in lines]
    return commands


@contextlib.contextmanager
def joined(link: Link, *, ranks: int = 2) -> Iterator[list[list[str]]]:
    """Set the link up; yield, for each of its ranks, the command that runs another one at its end.

    Args:   ranks: on loopback any number, on a shaped link 2.

    Raises: TransportError: this machine does not allow it; the sentence says why.
    """
    if link.rate is None:
        yield [[] for _ in range(ranks)]
        return
    assert ranks == 2, "checked by the command"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise TransportError(f"a link is shaped by {', '.join(TOOLS)}; this machine lacks {missing[0]}")
    user = os.geteuid() != 0
    with contextlib.ExitStack() as stack:
        own = ["--user", "--map-root-user"] if user else []
        first = stack.enter_context(_holder(["unshare", *own, "--net"]))
        # The second namespace belongs to the same user namespace, so one owner may join the two.
        owner = ["nsenter", "--target", str(first), "--user", "--preserve-credentials"] if user else []
        second = stack.enter_context(_holder([*owner, "unshare", "--net"]))
        for command in setup(link, (first, second), user=user):
            _run(command)
        yield [inside(holder, user=user) for holder in (first, second)]


def why_not(link: Link) -> str | None:
    """Why the link cannot be set up here, or None where it can; leaves nothing."""
    try:
        with joined(link):
            return None
    except PenstockError as error:
        return str(error)


@contextlib.contextmanager
def _holder(prefix: Sequence[str]) -> Iterator[int]:
    """A process with namespaces of its own, which lasts as long as the pipe to it: at most as long as we."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([*prefix, "sh", "-c", "echo && exec cat"], text=True, **pipes) as process:
        assert process.stdin and process.stdout and process.stderr, "they were asked for"  # noqa: PT018
        with process.stdin:
            if not process.stdout.readline():
                raise TransportError(_reason(prefix, process.stderr.read()))
            yield process.pid


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        ours = max(i for i, word in enumerate(command) if word in ("ip", "tc"))
        raise TransportError(_reason(command[ours:], done.stderr))


def _reason(command: Sequence[str], told: str) -> str:
    said = "; ".join(line.strip() for line in told.splitlines() if line.strip()) or "it failed silently"
    return f"{shlex.join(command)}: {said}"


def switch_off(device: str) -> dict[str, str]:
    """Switch off segmentation offload: return ``on``, ``off`` or the kernel's refusal for tso, gso and gro.

    With it on, a token bucket sees packets of up to 64 KiB, more than a slow link would ever carry at once.
    """
    told = {}
    for name, (read, write) in _READ_AND_WRITE.items():
        try:
            if _ethtool(device, read):
                _ethtool(device, write)
            told[name] = "on" if _ethtool(device, read) else "off"
        except OSError as error:
            told[name] = f"unknown ({error.strerror})"
    return told


def _ethtool(device: str, command: int) -> int:
    """One request about a device: (command, value) goes in and comes back."""
    import fcntl

    value = array.array("I", [command, 0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("16sP", device.encode(), value.buffer_info()[0]))
    return value[1]
