"""What launchers tell a process about the others: torchrun, accelerate launch, srun, Lightning's variables."""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
from contextlib import suppress
from ipaddress import ip_address

COUNTS = {  # environment variables in which launchers pass the number of processes
    "WORLD_SIZE": "torchrun",
    "SLURM_STEP_NUM_TASKS": "srun",  # not SLURM_NTASKS, which is also set in a batch script that calls torchrun
}
BY_HAND = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")  # variables of Lightning, where no launcher starts the nodes
GLOO = "GLOO_SOCKET_IFNAME"  # environment variable with the name of an interface
SIOCGIFADDR = 0x8915  # Linux: the address of an interface


def requested() -> tuple[int, str]:
    """Return how many processes the launcher was asked for, and its name; (1, "python") if no launcher is found."""
    counts = [(int(os.environ[key]), name) for key, name in COUNTS.items() if os.environ.get(key, "").isdecimal()]
    return max(counts, default=(1, "python"))


def set_variables() -> None:
    """Set the environment variables that torch.distributed reads for a task of srun; other launchers set them."""
    size, launcher = requested()
    if launcher == "srun":
        job = os.environ.get("SLURM_JOB_ID", "")
        os.environ |= {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": str(size)}
        os.environ.setdefault("MASTER_ADDR", _slurm_nodes()[0])
        os.environ.setdefault("MASTER_PORT", str(15000 + int(job[-4:]) if job.isdecimal() else 12910))  # Lightning's


def choose_interface(address: str) -> None:
    """Let gloo use the interface that leads to `address`, of rank 0, unless all are on one node or the user has chosen.

    By itself gloo takes the one that the name of the host stands for: often that is loopback, where processes on other
    nodes do not find this one. Rank 0 itself may know its own name as loopback, too; then another node of SLURM shows
    the way.
    """
    if GLOO in os.environ or sys.platform != "linux":
        return
    for other in (address, *_slurm_nodes()[1:]):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((other, 9))  # sends nothing
            own = probe.getsockname()[0]
            if not ip_address(own).is_loopback and (name := _interface(probe, own)):
                os.environ[GLOO] = name
                return


def _interface(probe: socket.socket, address: str) -> str | None:
    """Return the name of the interface with this IPv4 address."""
    from fcntl import ioctl

    for _, name in socket.if_nameindex():
        with suppress(OSError):  # an interface without an address
            request = struct.pack("256s", name.encode()[:15])
            if socket.inet_ntoa(ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24]) == address:
                return name
    return None


def _slurm_nodes() -> list[str]:
    """Return the first and the last name in SLURM's list of nodes: gpu07 and gpu12 of gpu[07-09,12]; or loopback."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    first = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodes).split(",")[0]
    return [first, re.sub(r"\[[^\]]*?(\w+)\]", r"\1", nodes).split(",")[-1]]
