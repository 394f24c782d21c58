"""The network interface by which this node reaches the others."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address

GLOO = "GLOO_SOCKET_IFNAME"  # environment variable with the name of an interface
SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def plain_address(name: tuple) -> str:
    """Return the IP address in a socket's name, an IPv4 address as such."""
    return name[0].removeprefix("::ffff:")


def choose_for_gloo(addresses: Sequence[str]) -> str:
    """Let gloo use the interface of the first of this node's addresses that others can reach; return the address.

    By itself gloo takes the one that the name of the host stands for: often that is loopback, and processes on other
    nodes look for this one on their own. Nothing is changed if all processes are on this node (an empty string is
    returned), or if the user has chosen.
    """
    outward = [address for address in addresses if address and not ip_address(address).is_loopback]
    if outward and GLOO not in os.environ and (name := _interface(outward[0])):
        os.environ[GLOO] = name
    return outward[0] if outward else ""


def _interface(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address, None if it is not found."""
    if sys.platform != "linux":
        return None
    from fcntl import ioctl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                if socket.inet_ntoa(ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None
