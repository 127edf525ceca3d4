"""The network device that has an address, for gloo, which listens on a device by its name."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from ...compression.errors import TransportError

_SIOCGIFADDR = 0x8915


def device_with(address: str) -> str:
    """Return the name of the network device of this machine that has ``address``.

    Raises: TransportError: none has.
    Source: netdevice(7), proc_net(5)."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(wanted, ipaddress.IPv6Address) and wanted.ipv4_mapped:
        wanted = wanted.ipv4_mapped
    found = _of_version_6(wanted) if wanted.version == 6 else _of_version_4(wanted)
    if found is None and wanted.is_loopback:
        found = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if found is None:
        raise TransportError(
            f"no network device of this machine has {address} as its first address; name the device in "
            "GLOO_SOCKET_IFNAME"
        )
    return found


def _of_version_4(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # a device without an address
                told = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                if ipaddress.ip_address(told[20:24]) == wanted:
                    return name
    return None


def _of_version_6(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            if ipaddress.ip_address(bytes.fromhex(digits)) == wanted:
                return name
    return None
