"""How the processes of a program find one another, on one node or many, and agree that all are there.

Rank 0 listens, and writes its port into the store of the launcher; the others connect, and wait for its word that all
have come. A process that cannot take part says why, and all end with its line. The connections stay as `Lifelines`.
"""

from __future__ import annotations

import json
import secrets
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from uvit_decay.runtime.errors import UserError, explained, one_line
from uvit_decay.runtime.interfaces import choose_for_gloo, plain_address
from uvit_decay.runtime.launchers import Place
from uvit_decay.runtime.lifelines import Lifelines, receive, send

PATIENCE = 600.0  # seconds until all processes must have come; torchrun itself waits 15 minutes for the nodes
REMARK = 30.0  # seconds after which rank 0 says for whom it waits
LINGER = 30.0  # seconds in which a process that cannot take part waits for others, to tell them
KEY = "uvit_decay/meeting"  # in the store
ADVICE = "start the same command on every node (docs/machines.md)"
_lifelines: Lifelines | None = None
_name = ""  # of this process
_refused = False  # whether the last meeting has failed: all know that already


class Guest(NamedTuple):
    """A process that has come to rank 0."""

    connection: socket.socket
    rank: int  # -1 if it knows only its node's
    size: int | None
    host: str
    problem: str  # that keeps it from taking part

    @property
    def name(self) -> str:
        return f"process {self.rank} on {self.host}" if self.rank >= 0 else f"a process on {self.host}"


def lifelines() -> Lifelines | None:
    """Return the connections to the other processes; None for one process, and before they have met."""
    return _lifelines


def meet(place: Place, problem: str = "", patience: float | None = None) -> dist.Store:
    """Return the store of all processes when they have come; all must call this, with the `problem` that keeps them.

    They may meet again, in the same store, when they have left.

    Raises:
        UserError: a process has not come within `patience` seconds (None: PATIENCE), has a problem, or says that it has
            the rank of another.
    """
    global _lifelines, _name, _refused
    patience, _refused = PATIENCE if patience is None else patience, True
    _name = f"process {place.rank} on {socket.gethostname()}"
    seconds = min(LINGER, patience) if problem else patience
    what = f"the processes of this program cannot meet at {place.where}"
    hint = f"it must be an address of the node with rank 0 that all reach; {ADVICE}"
    with explained(what, RuntimeError, ValueError, OSError, hint=hint):
        options = {"is_master": place.rank == 0 and not place.served, "wait_for_workers": False, "multi_tenant": True}
        store = dist.TCPStore(place.address, place.port, place.size, timeout=timedelta(seconds=seconds), **options)
        _lifelines = _host(place, store, problem, seconds) if place.rank == 0 else _join(place, store, problem, seconds)
    _refused = False
    return store


def leave(problem: str = "") -> None:
    """Leave the other processes, if they have met: in order, or ending them with a `problem`."""
    if _lifelines is not None:
        _lifelines.close(problem)


def failure(error: BaseException) -> str:
    """Return what the other processes are told of an error of this one; empty for the end of a program in order."""
    if isinstance(error, SystemExit) and not error.code:
        return ""
    if isinstance(error, RuntimeError) and _lifelines is not None:
        _lifelines.lost()  # for `raise_if_lost`: after this process has left, others end because of it
    return f"{_name} has ended: {one_line(error)}"


def raise_if_lost(error: BaseException) -> None:
    """Raise a UserError with the reason if `error`, of a collective, comes from another process, which has ended."""
    reason = _lifelines.lost() if _lifelines is not None else ""
    if reason:
        raise UserError(reason) from error


def report(problem: str) -> None:
    """Tell the other processes, if a launcher has started some that may wait for this one, why it ends."""
    place = Place.of_environment()
    waited_for = (_lifelines is None or _lifelines.in_order) and not _refused and not dist.is_initialized()
    if place is not None and waited_for:
        with suppress(UserError):
            meet(place, problem)


def _host(place: Place, store: dist.Store, problem: str, seconds: float) -> Lifelines:
    """Receive all other processes at rank 0."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual, backlog=place.size or 128) as server:
        mine = json.dumps([server.getsockname()[1], secrets.token_hex(16)])
        if store.compare_set(KEY, "", mine).decode() != mine:  # another process has rank 0
            return _join(place, store, problem, seconds)
        guests, problem = _receive(place, server, json.loads(mine)[1], problem, seconds)
        store.delete_key(KEY)  # before any of them may come again
    if problem:
        raise UserError(problem)
    ours = [plain_address(guest.connection.getsockname()) for guest in guests]
    address = choose_for_gloo(ours)
    for guest in guests:
        send(guest.connection, address=address)
    return Lifelines({guest.rank: guest.connection for guest in guests}, {guest.rank: guest.name for guest in guests})


def _receive(place: Place, server: socket.socket, token: str, problem: str, seconds: float) -> tuple[list[Guest], str]:
    """Return the others, and the problem of this or another process, which those that have come are told."""
    guests: list[Guest] = []
    begun, remarked = time.monotonic(), False
    server.settimeout(0.5)
    if problem:
        problem = f"{_name}: {problem}"
    until = begun + seconds
    while (place.size is None or len(guests) < place.size - 1) and time.monotonic() < until:
        if not remarked and time.monotonic() > begun + REMARK:
            remarked = True
            print(f"waiting for {_missing(place, guests)} at {place.where}", file=sys.stderr, flush=True)
        guest = _accept(server, token)
        if guest is None:
            continue
        if not problem and (problem := _problem(place, guests, guest)):
            until = min(until, time.monotonic() + LINGER)
        guests.append(guest)
    if not problem and len(guests) < place.size - 1:
        problem = f"{_missing(place, guests)} did not come to {place.where} in {seconds / 60:g} minutes: {ADVICE}"
    for guest in guests if problem else ():
        with suppress(OSError):
            send(guest.connection, problem=problem)
    return guests, problem


def _accept(server: socket.socket, token: str) -> Guest | None:
    """Return the next process of this program; None for a stranger, or if none comes now."""
    try:
        connection, _ = server.accept()
    except TimeoutError:
        return None
    connection.settimeout(10)
    with suppress(OSError, ValueError):
        hello = receive(connection) or {}
        if secrets.compare_digest(str(hello.pop("token", "")), token):
            return Guest(connection, **hello)
    connection.close()
    return None


def _problem(place: Place, guests: list[Guest], guest: Guest) -> str:
    """Return what keeps the program from starting, now that this guest has come; empty if nothing does."""
    if guest.problem:
        return f"{guest.name}: {guest.problem}"
    if guest.size != place.size:
        return f"{guest.name} is one of {guest.size} processes, process 0 one of {place.size}: {ADVICE}"
    hosts = {0: socket.gethostname(), **{other.rank: other.host for other in guests}}
    if guest.rank in hosts:
        where = f"{hosts[guest.rank]} and {guest.host}"
        return f"two processes have rank {guest.rank}, on {where}: give every node a number of its own, {ADVICE}"
    return ""


def _missing(place: Place, guests: list[Guest]) -> str:
    """Return the ranks that have not come."""
    absent = sorted(set(range(1, place.size or 1)) - {guest.rank for guest in guests})
    shown = ", ".join(map(str, absent[:5])) + (", ..." if len(absent) > 5 else "")
    return f"{len(absent)} of {place.size} processes (rank {shown})"


def _join(place: Place, store: dist.Store, problem: str, seconds: float) -> Lifelines:
    """Come to rank 0, and wait until all others have come."""
    store.wait([KEY])
    port, token = json.loads(store.get(KEY))
    connection = socket.create_connection((place.address, port), timeout=LINGER)
    hello = {"rank": place.rank, "size": place.size, "host": socket.gethostname(), "problem": problem}
    send(connection, token=token, **hello)
    connection.settimeout(seconds + LINGER)
    answer = receive(connection)
    if answer is None:
        raise UserError("process 0 has ended before all had come")
    if "problem" in answer:
        raise UserError(answer["problem"])
    choose_for_gloo([plain_address(connection.getsockname()), answer["address"]])
    return Lifelines({0: connection}, {0: f"process 0 on {place.address}"})
