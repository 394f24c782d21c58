"""The processes of a run, before training brings them together: they agree on plain values, and nothing waits for ever.

All meet as those of training do, whose lifelines end them if one of them ends. What they say goes through the store.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from uvit_decay.preflight.plan import Run
from uvit_decay.runtime.errors import UserError, one_line
from uvit_decay.runtime.launchers import Place
from uvit_decay.runtime.meeting import failure, leave, lifelines, meet

ANSWER = 60.0  # seconds in which an all-reduce must answer
GRACE = 5.0  # seconds beyond that, and for others to leave
HINT = "a firewall, or the wrong interface of several: set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME"


class Meeting:
    """All processes that exist at `place`; a context manager, whose exit lets the others end if this one has failed.

    Args:
        place: of this process among them.
        patience: seconds until all must have come; None: those of every meeting.

    Raises:
        UserError: not all processes come; on all that do, with the same line.
    """

    def __init__(self, place: Place, patience: float | None = None) -> None:
        self.rank, self.size, self.where = place.rank, place.size, f"{place.address}:{place.port}"
        self.name = f"rank {place.rank} on {socket.gethostname()}"
        self.tcp = meet(place, patience=patience)  # rank 0 serves it, until training has its own at the same port
        self._lines = lifelines()
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._store = dist.PrefixStore(f"uvit_decay/preflight/{attempt}", self.tcp)

    @classmethod
    def of(cls, run: Run, patience: float | None = None) -> Meeting:
        """Return the meeting of all ranks or, where Lightning will start them, of the first process of each node."""
        trainer, cluster = run.trainer, run.trainer.strategy.cluster_environment
        rank, size = trainer.node_rank, trainer.num_nodes
        if run.launched_outside:
            rank, size = rank * trainer.num_devices + trainer.local_rank, size * trainer.num_devices
        here = Place.of_environment()
        served = here is not None and here.served
        return cls(Place(rank, size, trainer.local_rank, cluster.main_address, cluster.main_port, served), patience)

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None:
            self.farewell()
        lost = self._lines.lost() if isinstance(error, RuntimeError) else ""  # a collective that another one has left
        self._lines.close("" if error is None else failure(error))
        if lost:
            raise UserError(lost) from error

    def farewell(self) -> None:
        """Stay on rank 0, whose store the others read, until they have left."""
        self._store.set(f"left/{self.rank}", "")
        start = time.monotonic()
        while self.rank == 0 and self._missing("left") and time.monotonic() - start < GRACE:
            time.sleep(0.01)

    def _missing(self, name: str) -> bool:
        """Return whether a rank has not set this key yet."""
        return not self._store.check([f"{name}/{rank}" for rank in range(self.size)])

    def _pause(self) -> None:
        """Wait a moment for the others; raise a UserError if one has ended."""
        if reason := self._lines.lost(0.05):
            raise UserError(reason)

    def agree(self, name: str, mine: Any, judge: Callable[[list[Any]], Any]) -> Any:
        """Return on all ranks what `judge` on rank 0 makes of the plain values of all; they may take long to come."""
        try:
            self._store.set(f"{name}/{self.rank}", json.dumps(mine))
            if self.rank == 0:
                while self._missing(name):
                    self._pause()
                values = self._store.multi_get([f"{name}/{rank}" for rank in range(self.size)])
                self._store.set(f"{name}/all", json.dumps(judge([json.loads(value) for value in values])))
            while not self._store.check([f"{name}/all"]):
                self._pause()
            return json.loads(self._store.get(f"{name}/all"))
        except RuntimeError as error:
            raise UserError(self._lines.lost() or "rank 0 has ended") from error

    def all_reduce(self, device: torch.device, answer: float = ANSWER) -> float:
        """Add a number over all ranks with the backend of training; return the seconds that it took."""
        # It would keep the group that exists when it is first imported, see Processes.launched.
        import torch.distributed.nn.functional

        backend, start = dist.get_default_backend_for_device(device), time.monotonic()
        why = f"{self.size} ranks meet at {self.where}, but {self.name} gets no all-reduce ({backend})"
        why += f" within {answer:g} s: {HINT}"
        late = threading.Timer(answer + GRACE, _end, [why])  # NCCL raises no error on the thread that waits
        late.daemon = True
        late.start()
        try:
            store = dist.PrefixStore("all_reduce", self._store)
            timeout = timedelta(seconds=answer)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
            total = torch.ones(1, device=device)
            dist.all_reduce(total)
            if int(total) != self.size:
                raise UserError(f"the all-reduce ({backend}) of {self.size} ones is {int(total)}")
        except RuntimeError as error:
            raise UserError(self._lines.lost(0.5) or f"{why}; {one_line(error)}") from error
        finally:
            late.cancel()
            if dist.is_initialized():
                dist.destroy_process_group()
        return time.monotonic() - start


def _end(message: str) -> None:
    """End this process at once, whose main thread waits for an answer that does not come."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    leave(message)
    os._exit(2)
