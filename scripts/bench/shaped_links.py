"""Links of a known speed between ranks of this machine: network namespaces, a bridge, token buckets.

A speed that is only computed would leave out what slow links really do to a schedule. The namespaces belong
to processes that do nothing else and end with this one, however it ends, so nothing is ever left behind.

Source: tc-tbf(8), unshare(1), veth(4), linux/ethtool.h (SIOCETHTOOL)."""

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

from penstock.compression.errors import TransportError
from penstock.stages.units import parse_rate

LOOPBACK, DEVICE = "loopback", "penstock0"
ADDRESSES = [f"10.77.0.{number}" for number in range(1, 255)]
TOOLS = ("unshare", "nsenter", "ip", "tc")
BURST_BYTES, LATENCY = 64 << 10, "400ms"  # of the bucket, and the longest that a packet waits in it
SIOCETHTOOL, SET_OFFLOADS = 0x8946, (0x1F, 0x24, 0x2C)  # tso, gso, gro


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Link of a rank to the others; without a rate (bits per second each way) it is the loopback device."""

    name: str
    rate: float | None = None

    @property
    def device(self) -> str:
        """Network device of a rank."""
        return "lo" if self.rate is None else DEVICE


def parse_link(value: str) -> Link:
    """Return the link that is called ``loopback``, or has a rate such as ``100Mbit``."""
    return Link(name=value, rate=None if value == LOOPBACK else parse_rate(value, name="links"))


@contextlib.contextmanager
def joined(link: Link, *, ranks: int = 2) -> Iterator[list[list[str]]]:
    """Set the link up; yield, for each of its ranks, the command that runs another one at its end."""
    if link.rate is None:
        yield [[] for _ in range(ranks)]
        return
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise TransportError(f"a link is shaped by {', '.join(TOOLS)}; this machine lacks {missing[0]}")
    user = os.geteuid() != 0  # then the namespaces belong to a user namespace
    keep = ["--user", "--preserve-credentials"] if user else []
    with contextlib.ExitStack() as stack:
        # 1. namespaces of a switch and of the ranks; these in its user namespace, so one owner may join them
        own = ["--user", "--map-root-user"] if user else []
        switch = stack.enter_context(_holder(["unshare", *own, "--net"]))
        owner = ["nsenter", "--target", str(switch), *keep] if user else []
        holders = [stack.enter_context(_holder([*owner, "unshare", "--net"])) for _ in range(ranks)]
        inside, *ends = (["nsenter", "--target", str(one), *keep, "--net"] for one in (switch, *holders))
        _run(inside, "ip link add switch type bridge")
        _run(inside, "ip link set switch up")
        # 2. a link from each rank to it, of that speed both ways
        bucket = f"tbf rate {round(link.rate)}bit burst {BURST_BYTES}b latency {LATENCY}"
        for end, holder, address in zip(ends, holders, ADDRESSES[:ranks], strict=True):
            _run(inside, f"ip link add port{holder} type veth peer name {DEVICE} netns {holder}")
            _run(inside, f"ip link set port{holder} master switch up")
            _run(inside, f"tc qdisc add dev port{holder} root {bucket}")
            _run(end, f"ip address add {address}/24 dev {DEVICE}")
            _run(end, "ip link set lo up")
            _run(end, f"ip link set {DEVICE} up")
            _run(end, f"tc qdisc add dev {DEVICE} root {bucket}")
        yield ends


@contextlib.contextmanager
def _holder(prefix: Sequence[str]) -> Iterator[int]:
    """Run a process with its own namespaces, which lasts as long as the pipe to it: at most as long as we."""
    command, pipe = [*prefix, "sh", "-c", "echo && exec cat"], subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin and process.stdout and process.stderr, "they are pipes"  # noqa: PT018
        with process.stdin:
            if not process.stdout.readline():
                raise TransportError(f"{shlex.join(prefix)}: {' '.join(process.stderr.read().split())}")
            yield process.pid


def _run(end: Sequence[str], command: str) -> None:
    done = subprocess.run([*end, *command.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise TransportError(f"{command}: {' '.join(done.stderr.split())}")


def switch_off_offloads(device: str) -> bool:
    """Switch off tso, gso and gro; False where the kernel refuses.

    With them a token bucket sees packets of up to 64 KiB, more than a slow link would ever carry at once."""
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for command in SET_OFFLOADS:
            value = array.array("I", [command, 0])
            request = struct.pack("16sP", device.encode(), value.buffer_info()[0])
            fcntl.ioctl(any_socket, SIOCETHTOOL, request)
        return True
    return False
