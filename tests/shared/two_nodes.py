"""Two nodes on one machine: namespaces with an address and a hostname each or, without the rights, two of loopback.

A node of namespaces has a network, processes, mounts and a hostname of its own. It can lose its cable or its power, and
see other files than its neighbour. Without the rights (root, or CAP_SYS_ADMIN) the nodes are groups of processes on
127.0.0.1 and 127.0.0.2, which differ in their environment alone.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import CompletedProcess

from programs import ranks

ROOT = Path(__file__).resolve().parents[2]
TAG = "TEST_NODE"  # environment variable of all processes of a node
NEW = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private"]
# Print this process's number outside, then be the first process inside until the test ends or is killed.
HOLD = (
    'read pid rest < /proc/self/stat; echo $pid; mount -t proc proc /proc; hostname "$0"; ip link set lo up; exec cat'
)


@dataclass
class Running:
    """A command that runs on a node, with its output in files: processes that it leaves would keep pipes open."""

    process: subprocess.Popen
    output: tuple[Path, Path]

    def wait(self, timeout: float) -> CompletedProcess:
        """Return what it did; raise subprocess.TimeoutExpired if it does not end."""
        code = self.process.wait(max(0.1, timeout))
        return CompletedProcess(self.process.args, code, *self.texts())

    def texts(self) -> tuple[str, str]:
        """Return the output so far."""
        out, err = (path.read_text(errors="replace") for path in self.output)
        return out, err

    def until(self, word: str, timeout: float = 120) -> None:
        """Wait until the command has printed `word`."""
        end = time.monotonic() + timeout
        while not any(word in text for text in self.texts()):
            assert self.process.poll() is None, f"ended before it printed {word!r}:\n" + "\n".join(self.texts())
            assert time.monotonic() < end, f"no {word!r} in {timeout} s:\n" + "\n".join(self.texts())
            time.sleep(0.05)


@dataclass
class Node:
    """One of the two nodes."""

    number: int
    address: str
    folder: Path  # of the output of commands
    holder: subprocess.Popen | None = None  # the first process of its namespaces
    pid: int = 0  # of the holder, outside
    tag: str = field(default_factory=lambda: secrets.token_hex(8))
    environment: dict[str, str] = field(default_factory=dict)  # of all its commands

    def start(self, command: Sequence[object], cwd: Path, **variables: object) -> Running:
        """Start a command."""
        words = [str(word) for word in command]
        own = {TAG: self.tag, **self.environment, **{name: str(value) for name, value in variables.items()}}
        words = [*self.inside(), "env", "-C", str(cwd), *words]  # by its name there, where other files may be mounted
        output = tuple(self.folder / f"{self.number}-{secrets.token_hex(4)}.{kind}" for kind in ("out", "err"))
        with output[0].open("w") as out, output[1].open("w") as err:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
            process = subprocess.Popen(words, cwd=cwd, env=environment, start_new_session=True, **streams)
        return Running(process, output)

    def inside(self) -> list[str]:
        """Return the words that start a command in the node's namespaces; empty without namespaces."""
        return [] if not self.holder else ["nsenter", "-t", str(self.pid), "--net", "--uts", "--mount", "--pid"]

    def ip(self, *words: str) -> None:
        """Run `ip` in this node's network."""
        subprocess.run(["nsenter", "-t", str(self.pid), "--net", "ip", *words], check=True)

    def mount(self, *words: object) -> None:
        """Mount something for this node alone: `mount("-t", "tmpfs", "none", path)`."""
        subprocess.run([*self.inside(), "mount", *map(str, words)], check=True)

    def unmount(self, path: Path) -> None:
        """Undo a `mount`."""
        subprocess.run([*self.inside(), "umount", str(path)], check=True)

    def processes(self) -> list[int]:
        """Return the processes that the node's commands have started and that have not ended."""
        tag, found = f"{TAG}={self.tag}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                running = (folder / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
                if running and tag in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                continue  # it has ended, or is another user's
        return found

    def kill(self) -> None:
        """Kill all processes of the node with SIGKILL; the kernel closes their connections."""
        while found := self.processes():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def plug(self, state: str = "up") -> None:
        """Disconnect the node's cable (down), so that not even closed connections are noticed, or connect it again."""
        self.ip("link", "set", "wire", state)

    def remove(self) -> None:
        self.kill()
        if self.holder:
            self.holder.kill()  # and with it, by --kill-child, the first process of the namespaces
            self.holder.wait()


@dataclass
class TwoNodes:
    """Two connected nodes, and a free port on the first."""

    nodes: tuple[Node, Node]
    port: int

    def start(self, command: Sequence[object], cwd: Path, **variables: object) -> list[Running]:
        """Start the same command on both nodes, with the environment variables of Lightning."""
        return [node.start(command, cwd, **{**self.variables(node), **variables}) for node in self.nodes]

    def variables(self, node: Node) -> dict[str, object]:
        """Return the variables that the commands of docs/machines.md read."""
        common = {"MASTER_ADDR": self.nodes[0].address, "MASTER_PORT": self.port, "NODES": 2, "GPUS": 1}
        return {**common, "NODE_RANK": node.number}

    def run(self, command: Sequence[object], cwd: Path, **variables: object) -> list[CompletedProcess]:
        """Return the results of a command on both nodes; see `wait`."""
        return self.wait(self.start(command, cwd, **variables))

    def batch(self, script: Path, cwd: Path) -> Running:
        """Start an sbatch script on both nodes; tests/shared/fake_srun.py starts its tasks there."""
        count, names = len(self.nodes), ",".join(f"node{node.number}" for node in self.nodes)
        own = [{TAG: node.tag, **node.environment} for node in self.nodes]
        words = [[f"{name}={value}" for name, value in variables.items()] for variables in own]
        inside = [[*node.inside(), "env", "-C", str(cwd), *words[node.number]] for node in self.nodes]
        job = {"JOB_ID": 14500, "JOB_NAME": script.name, "NNODES": count, "JOB_NUM_NODES": count, "NTASKS": count}
        job |= {"NTASKS_PER_NODE": 1, "NODELIST": names, "JOB_NODELIST": names, "TASKS_PER_NODE": f"1(x{count})"}
        variables = {f"SLURM_{name}": str(value) for name, value in job.items()} | {"TEST_NODES": json.dumps(inside)}
        if not self.nodes[0].holder:  # no names stand for the addresses of loopback
            variables |= {"MASTER_ADDR": self.nodes[0].address, "MASTER_PORT": str(self.port)}
        outside = replace(self.nodes[0], holder=None)  # srun itself reaches all nodes
        return outside.start(["bash", script], cwd, **variables)

    def wait(self, running: Sequence[Running], timeout: float = 200) -> list[CompletedProcess]:
        """Return what the commands did; after `timeout` seconds kill all processes, and fail with what they printed."""
        end = time.monotonic() + timeout
        try:
            return [one.wait(end - time.monotonic()) for one in running]
        except subprocess.TimeoutExpired:
            printed = "\n".join("\n".join(one.texts()) for one in running)
            raise AssertionError(f"not all have ended after {timeout} s:\n{printed}") from None
        finally:
            for node in self.nodes:
                node.kill()


def can_isolate() -> bool:
    """Return whether this user may make namespaces, and has the programs for it."""
    if sys.platform != "linux" or not all(map(shutil.which, ("unshare", "nsenter", "ip", "mount", "hostname"))):
        return False
    trial = subprocess.run([*NEW, "ip", "link", "add", "trial", "type", "veth"], capture_output=True, timeout=30)
    return trial.returncode == 0


@contextmanager
def two_nodes(folder: Path) -> Iterator[TwoNodes]:
    """Yield two nodes, isolated if that is allowed; nothing of them is left afterwards."""
    isolated = can_isolate()
    nodes = tuple(Node(i, f"10.77.0.{i + 1}" if isolated else f"127.0.0.{i + 1}", folder) for i in range(2))
    try:
        if isolated:
            for node in nodes:
                hold = [*NEW, "sh", "-c", HOLD, f"node{node.number}"]
                node.holder = subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                node.pid = int(node.holder.stdout.readline())
            _connect(*nodes)
            _name(*nodes)
        yield TwoNodes(nodes, 29500 if isolated else int(ranks()[0]["MASTER_PORT"]))
    finally:
        for node in nodes:
            node.remove()


def _connect(a: Node, b: Node) -> None:
    """Lay a cable between two nodes."""
    a.ip("link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", str(b.pid))
    for node in (a, b):
        node.ip("addr", "add", f"{node.address}/24", "dev", "wire")
        node.ip("link", "set", "wire", "up")


def _name(a: Node, b: Node) -> None:
    """Let each node know the other by name, and itself, as many distributions do, as a loopback address."""
    for node, other in ((a, b), (b, a)):
        hosts, resolver = node.folder / f"hosts{node.number}", node.folder / f"resolv{node.number}"
        mine, theirs = f"node{node.number}", f"{other.address} node{other.number}"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {mine}\n{theirs}\n{node.address} {mine}.cluster\n")
        resolver.write_text("")  # no server of names: what is asked beyond these must fail at once
        node.mount("--bind", hosts, "/etc/hosts")
        node.mount("--bind", resolver, "/etc/resolv.conf")
