"""The ranks of a run at its main address, before training brings them together: nothing here waits for ever.

Ranks meet in a TCPStore, that of torchrun or one of rank 0 at MASTER_ADDR:MASTER_PORT, which training uses afterwards.
Each rank beats there every few seconds. When one reports a failure, or its heart stops, all others end with one line,
even those that wait in a collective operation.
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

PATIENCE = 60.0  # seconds in which all ranks must answer
BEAT = 2.0  # seconds between two beats of a rank
STOPPED = 30.0  # seconds without a beat after which a rank has ended
GRACE = 5.0  # seconds in which a rank ends by itself after another one's failure
AWAY = "rank 0 has ended"
HINT = "a firewall, or the wrong interface of several: NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME"


class Meeting:
    """The rank `rank` of `size` at `address`:`port`; to be used as a context manager.

    Args:
        rank: of this process.
        size: number of processes that must come.
        address: of rank 0.
        port: of the store there.
        patience: seconds in which all must answer.

    Raises:
        UserError: not all ranks answer in time; on all ranks that do, with the same line.
    """

    def __init__(self, rank: int, size: int, address: str, port: int, patience: float = PATIENCE) -> None:
        self.rank, self.size, self.patience = rank, size, patience
        self.where = f"{address}:{port}"
        self._verdict = ""  # the failure that ends all ranks
        self._closed = threading.Event()
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._tcp = [self._connect(address, port, rank == 0 and not agent) for _ in range(2)]
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # A store is used by one thread at a time.
        self._store, self._guarding = (dist.PrefixStore(f"uvit_decay/{attempt}", store) for store in self._tcp)

    @classmethod
    def of(cls, run: Run, patience: float = PATIENCE) -> Meeting:
        """Return the meeting of the processes that exist: all ranks, or those that will start the ranks of a node."""
        trainer, cluster = run.trainer, run.trainer.strategy.cluster_environment
        rank, size = trainer.node_rank, trainer.num_nodes
        if run.launched_outside:
            rank, size = rank * trainer.num_devices + trainer.local_rank, size * trainer.num_devices
        return cls(rank, size, cluster.main_address, cluster.main_port, patience)

    def _connect(self, address: str, port: int, serve: bool) -> dist.TCPStore:
        """Connect to the store, or serve it; `multi_tenant` lets training serve its own from the same port later."""
        patience = timedelta(seconds=self.patience)
        try:
            return dist.TCPStore(address, port, None, serve, patience, wait_for_workers=False, multi_tenant=True)
        except (RuntimeError, ValueError) as error:
            if "EADDRINUSE" in str(error):
                raise UserError(f"port {port} of this machine is taken: set MASTER_PORT to another one") from error
            reason = f"rank {self.rank} on {socket.gethostname()}: no answer at {self.where} within {self.patience:g} s"
            raise UserError(f"{reason}; MASTER_ADDR and MASTER_PORT are those of the first node? {HINT}") from error

    def __enter__(self) -> Meeting:
        threading.Thread(target=self._guard, daemon=True).start()
        self._store.set(f"here/{self.rank}", socket.gethostname())
        start = time.monotonic()
        try:
            while missing := self._missing("here"):
                if time.monotonic() - start > self.patience:
                    self.fail(self._unanswered(missing))
                self._pause()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and not self._verdict:
            self._tell(f"rank {self.rank} on {socket.gethostname()}: {one_line(error)}")
        self.close()

    def _missing(self, name: str) -> list[int]:
        """Return the ranks that have not set this key yet."""
        keys = {rank: f"{name}/{rank}" for rank in range(self.size)}
        if self._store.check(list(keys.values())):
            return []
        return [rank for rank, key in keys.items() if not self._store.check([key])]

    def _unanswered(self, missing: list[int]) -> str:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        there = [rank for rank in range(self.size) if rank not in missing][:8]
        hosts = sorted({self._store.get(f"here/{rank}").decode() for rank in there})
        return (
            f"{self.size - len(missing)} of {self.size} ranks answered at {self.where} within {self.patience:g} s "
            f"(on {', '.join(hosts)}), not {shown}: were they started, with this MASTER_ADDR and MASTER_PORT? {HINT}"
        )

    def fail(self, message: str) -> None:
        """Let all ranks end with this line."""
        self._tell(message)
        raise UserError(self._verdict)

    def _tell(self, message: str) -> None:
        """Set the verdict, unless another rank was first."""
        try:
            self._verdict = self._store.compare_set("verdict", "", message).decode() or message
        except RuntimeError:
            self._verdict = message  # rank 0 has ended, which the others see for themselves

    def _pause(self) -> None:
        """Wait a moment for other ranks; raise the verdict if there is one."""
        if not self._verdict and self._store.check(["verdict"]):
            self._verdict = self._store.get("verdict").decode()
        if self._verdict:
            raise UserError(self._verdict)
        time.sleep(0.05)

    def agree(self, name: str, mine: Any, judge: Callable[[list[Any]], Any]) -> Any:
        """Return on all ranks what `judge` on rank 0 makes of the plain values of all; they may take long to come."""
        self._store.set(f"{name}/{self.rank}", json.dumps(mine))
        try:
            if self.rank == 0:
                while self._missing(name):
                    self._pause()
                values = self._store.multi_get([f"{name}/{rank}" for rank in range(self.size)])
                self._store.set(f"{name}/all", json.dumps(judge([json.loads(value) for value in values])))
            while not self._store.check([f"{name}/all"]):
                self._pause()
            return json.loads(self._store.get(f"{name}/all"))
        except RuntimeError as error:
            raise UserError(self._verdict or AWAY) from error

    def all_reduce(self, device: torch.device) -> float:
        """Add a number over all ranks with the backend of training; return the seconds that it took."""
        # It would keep the group that exists when it is first imported, see Processes.launched.
        import torch.distributed.nn.functional

        backend, start = dist.get_default_backend_for_device(device), time.monotonic()
        why = (
            f"the ranks meet at {self.where}, but their all-reduce ({backend}) does not end within {self.patience:g} s"
        )
        late = threading.Timer(self.patience + GRACE, self._end, [f"{why}: {HINT}"])
        late.daemon = True
        late.start()
        try:
            patience, store = timedelta(seconds=self.patience), dist.PrefixStore("all_reduce", self._store)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=patience)
            total = torch.ones(1, device=device)
            dist.all_reduce(total)
            if int(total) != self.size:
                self.fail(f"the all-reduce ({backend}) of {self.size} ones is {int(total)}")
        except RuntimeError as error:
            self.fail(f"{why}: {one_line(error)}; {HINT}")
        finally:
            late.cancel()
            if dist.is_initialized():
                dist.destroy_process_group()
        return time.monotonic() - start

    def _guard(self) -> None:
        """Beat, and watch: rank 0 the beats of all, the others its store; end a process that does not end itself."""
        seen: dict[int, tuple[int, float]] = {}
        while not self._closed.wait(BEAT):
            try:
                self._guarding.add(f"beats/{self.rank}", 1)
                if self.rank == 0 and (stopped := self._stopped(seen)) is not None:
                    host = self._guarding.get(f"here/{stopped}").decode()
                    self._guarding.compare_set("verdict", "", f"rank {stopped} on {host} has ended")
                if self._guarding.check(["verdict"]):
                    self._verdict = self._guarding.get("verdict").decode()
            except RuntimeError:
                self._verdict = self._verdict or AWAY
            if self._verdict and not self._closed.wait(GRACE):
                self._end(self._verdict)

    def _stopped(self, seen: dict[int, tuple[int, float]]) -> int | None:
        """Return a rank that has not beaten for long; `seen` holds its last beat and when that was counted here."""
        now = time.monotonic()
        for rank in range(1, self.size):
            beats = self._guarding.add(f"beats/{rank}", 0)
            count, when = seen.get(rank, (0, now))
            seen[rank] = (beats, when if beats == count else now)
            if beats and now - seen[rank][1] > STOPPED:
                return rank
        return None

    def _end(self, message: str) -> None:
        """End this process at once: its main thread waits for a rank that will never answer."""
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(2)

    def close(self) -> None:
        """End the watch; rank 0 stays until the others have left, or for some seconds."""
        self._closed.set()
        start = time.monotonic()
        try:
            self._store.set(f"left/{self.rank}", "")
            while self.rank == 0 and time.monotonic() - start < GRACE:
                others = [f"left/{rank}" for rank in range(self.size) if self._store.check([f"here/{rank}"])]
                if self._store.check(others):
                    break
                time.sleep(0.05)
        except RuntimeError:
            return  # rank 0 has left
