"""Connections by which the processes of a program notice that one has ended, whatever the others are waiting for.

A process that waits in a collective sees the end of another one at once with gloo, but not with NCCL, and with neither
if its node has lost the network or its power. So rank 0 keeps a TCP connection to every rank. The kernel closes it
with the process, and probes it while it is idle; nothing is sent during normal work. Whoever leaves in order says so.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

GRACE = 30.0  # seconds that a process has to end by itself, with its own message, when another has ended
IDLE, EVERY, PROBES = 60, 15, 4  # seconds before the first probe and between probes; this many unanswered are the end
LONGEST = 4096  # bytes of a message


def send(connection: socket.socket, **values: Any) -> None:
    """Send a message, one line of JSON."""
    connection.sendall(json.dumps(values).encode()[: LONGEST - 1] + b"\n")


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next message; None if the connection has ended. Raises ValueError for what is no message."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)  # messages are few and short
        if not byte:
            return None
        line += byte
        if len(line) > LONGEST:
            raise ValueError("too long for a message")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("no message")
    return message


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel notice within two minutes that the other side's node is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": IDLE, "TCP_KEEPINTVL": EVERY, "TCP_KEEPCNT": PROBES}.items():
        with suppress(AttributeError):  # macOS lacks one of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Lifelines:
    """Connections to other processes, watched by a thread until `close`.

    When another process ends out of order, this one has GRACE seconds to fail by itself, with its own message; then the
    thread prints the reason, and ends the process.

    Args:
        connections: by rank: all others on rank 0, and rank 0 on the others.
        names: of these processes in messages, by rank.
    """

    def __init__(self, connections: Mapping[int, socket.socket], names: Mapping[int, str]) -> None:
        self._connections, self._names = dict(connections), dict(names)
        self.in_order = False  # whether this process has left, and not because of a problem
        self._reason = ""
        self._lost, self._left = threading.Event(), threading.Event()
        self._selector = selectors.DefaultSelector()
        for rank, connection in self._connections.items():
            connection.settimeout(None)
            keep_alive(connection)
            self._selector.register(connection, selectors.EVENT_READ, rank)
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._watch, daemon=True, name="lifelines").start()

    def lost(self, seconds: float = 5.0) -> str:
        """Return why the program cannot go on, if another process ends within so many seconds; else an empty text.

        What happens after `close` does not count: others end because this process has.
        """
        if not self._left.is_set():
            self._lost.wait(seconds)
        return self._reason

    def close(self, problem: str = "") -> None:
        """Leave the others in order, or end them with this `problem`; later calls do nothing."""
        if self._left.is_set():
            return
        self.in_order = not problem
        self._left.set()
        self._tell({"problem": problem} if problem else {"bye": True})
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # the thread stops, too

    def _tell(self, message: dict[str, Any], but: int = -1) -> None:
        for rank, connection in self._connections.items():
            with suppress(OSError):  # it has gone itself
                if rank != but:
                    send(connection, **message)

    def _watch(self) -> None:
        waiting = len(self._connections)
        while waiting:
            for key, _ in self._selector.select():
                message = self._read(key.fileobj)
                if self._left.is_set():
                    return
                if "bye" not in message:
                    self._end(message.get("problem") or f"{self._names[key.data]} has ended", key.data)
                    return
                self._selector.unregister(key.fileobj)
                waiting -= 1

    def _read(self, connection: socket.socket) -> dict[str, Any]:
        try:
            return receive(connection) or {}
        except (OSError, ValueError):
            return {}

    def _end(self, reason: str, culprit: int) -> None:
        """Tell the others, and end this process if it does not end by itself."""
        self._reason = reason
        self._lost.set()
        self._tell({"problem": reason}, but=culprit)
        time.sleep(GRACE)
        if not self.in_order:
            os.write(2, f"error: {reason}\n".encode())
            os._exit(2)

    def _forget(self) -> None:
        """Close the connections in a forked process, as a reader of images is: it must not keep them open."""
        for connection in self._connections.values():
            connection.close()
