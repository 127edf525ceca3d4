"""Segmentation offload of a network device, read and switched off without the ``ethtool`` command.

With it on, a token bucket sees packets of up to 64 KiB, more than a slow link would ever carry at once.

Source: linux/ethtool.h, SIOCETHTOOL."""

from __future__ import annotations

import array
import socket
import struct

_SIOCETHTOOL = 0x8946
_READ_AND_WRITE = {"tso": (0x1E, 0x1F), "gso": (0x23, 0x24), "gro": (0x2B, 0x2C)}


def switch_off(device: str) -> dict[str, str]:
    """Switch off what of tso, gso and gro can be; return ``on``, ``off`` or the kernel's refusal of each."""
    return {name: _switch_off(device, *commands) for name, commands in _READ_AND_WRITE.items()}


def _switch_off(device: str, read: int, write: int) -> str:
    try:
        if _call(device, read):
            _call(device, write)
        return "on" if _call(device, read) else "off"
    except OSError as error:
        return f"unknown ({error.strerror})"


def _call(device: str, command: int) -> int:
    """One request about a device: (command, value) goes in and comes back."""
    import fcntl

    value = array.array("I", [command, 0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, struct.pack("16sP", device.encode(), value.buffer_info()[0]))
    return value[1]
