"""Two processes that compare their nodes, started by hand as on two machines, and by torchrun's variables."""

import json
import signal
import socket
import time

import pytest

from uvit_decay.preflight.meeting import Meeting
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.launchers import Place

SMALL = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.max_steps=20", "--trainer.limit_val_batches=0"]
EMPTY = "--trainer.callbacks=[]"
NODES = ["--trainer.num_nodes=2", "--trainer.strategy=ddp"]


def address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def both(programs, folders, *argv, own=((), ()), environments=({}, {})):
    """Start train.py on two nodes with flags and variables of their own; return both when they have ended."""
    shared, started = address(), []
    for rank in range(2):
        environment = {**shared, "NODE_RANK": str(rank), **environments[rank]}
        flags = [*argv, EMPTY, *SMALL, *NODES, *own[rank]]
        started.append(programs.start("train.py", *flags, cwd=folders[rank], environment=environment))
    return started, [program.wait() for program in started]


def errors(program):
    return [line for line in program.stderr.splitlines() if line.startswith("error: ")]


def test_nodes_that_are_alike_are_one_line_and_then_train(programs, tmp_path):
    started, codes = both(programs, [tmp_path] * 2, "fit")
    assert codes == [0, 0], started[0].stderr + started[0].stdout
    lines = [line for line in started[0].stdout.splitlines() if line.startswith("2 nodes: ")]
    assert len(lines) == 1
    assert "2 processes have the same settings, data (1437 images" in lines[0]
    assert lines[0].endswith(f"{tmp_path}/runs/digits, shared by all nodes")
    assert "2 nodes" not in started[1].stdout
    assert [path.name for path in (tmp_path / "runs" / "digits").iterdir()] == ["version_0"]


@pytest.mark.parametrize(
    ("own", "line"),
    [
        (["--data.batch_size=16"], "has --data.batch_size 16, rank 0 on {host} 32; start all with the same flags"),
        (["--data=uvit_decay.data.Images", "--data.path=/none"], "/none: no such folder, zip or tar; the data must be"),
    ],
)
def test_nodes_that_differ_end_with_the_same_line(programs, tmp_path, own, line):
    started, codes = both(programs, [tmp_path] * 2, "fit", own=((), own))
    host = socket.gethostname()
    assert codes == [2, 2]
    assert errors(started[0]) == errors(started[1])
    assert errors(started[0])[0].startswith(f"error: rank 1 on {host}")
    assert line.format(host=host) in errors(started[0])[0]
    assert not list((tmp_path / "runs" / "digits").iterdir())


def test_processes_that_cannot_add_a_number_end_with_one_line(programs, tmp_path):
    wrong = {"GLOO_SOCKET_IFNAME": "no-such-interface"}
    started, codes = both(programs, [tmp_path] * 2, "fit", environments=(wrong, wrong))
    assert codes == [2, 2]
    for program in started:  # each has its own line, or that of the other one, which was faster
        (line,) = errors(program)
        assert "2 ranks meet at 127.0.0.1:" in line
        assert "gets no all-reduce (gloo) within 60 s" in line
        assert "SOCKET_IFNAME" in line


def test_a_rank_that_does_not_come_is_named():
    port = int(address()["MASTER_PORT"])
    with pytest.raises(UserError, match=r"1 of 2 processes \(rank 1\) did not come to 127.0.0.1:\d+"):
        Meeting(Place(0, 2, 0, "127.0.0.1", port), patience=0.6)


@pytest.mark.slow
def test_the_doctor_of_a_sharded_network(programs, tmp_path):
    sharded = ["--trainer.strategy=fsdp"]
    started, codes = both(programs, [tmp_path] * 2, "doctor", own=(sharded, sharded))
    assert codes == [0, 0], started[0].stderr + started[0].stdout
    assert "ok       memory: a step of 1 x 16 images takes" in started[0].stdout


@pytest.mark.slow
def test_a_run_folder_that_is_not_shared_ends_both(programs, tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    started, codes = both(programs, folders, "fit")
    assert codes == [2, 2]
    assert errors(started[0]) == errors(started[1])
    assert (
        f"{folders[0]}/runs/digits of rank 0 is not seen as {folders[1]}/runs/digits by rank 1" in errors(started[0])[0]
    )
    assert "--trainer.logger.save_dir" in errors(started[0])[0]


def test_the_doctor_compares_two_ranks_and_times_their_steps(programs, tmp_path):
    ranks = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        | {"TORCHELASTIC_RUN_ID": "1"}
        for rank in range(2)
    ]
    one_node = ["--trainer.num_nodes=1", "--trainer.devices=2"]
    started, codes = both(programs, [tmp_path] * 2, "doctor", "--json", own=(one_node, one_node), environments=ranks)
    assert codes == [0, 0], started[0].stderr + started[0].stdout
    assert all(finding.keys() == {"level", "subject", "text", "flag"} for finding in json.loads(started[0].stdout))
    findings = {finding["subject"]: finding["text"] for finding in json.loads(started[0].stdout)}
    assert findings["all-reduce"].startswith("2 processes at 127.0.0.1:")
    assert findings["ranks"].startswith("2 = 1 node x 2, started by torchrun")
    assert "2 processes have the same" in findings["nodes"]
    assert "a step of 1 x 16 images" in findings["memory"]
    assert started[1].stdout == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_doctor_of_the_other(programs, tmp_path):
    folders, shared = [tmp_path] * 2, address()
    started = [
        programs.start(
            "train.py",
            *("doctor", EMPTY, *SMALL, *NODES, "--trainer.max_steps=1000000"),
            cwd=folders[rank],
            environment={**shared, "NODE_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    end = time.monotonic() + 60
    while "ok       data" not in started[0].stdout:
        assert time.monotonic() < end, started[0].stderr
        time.sleep(0.05)
    time.sleep(2)  # most often it is among its steps, then; else the other one waits for it to come, and ends later
    started[1].send(signal.SIGKILL)
    assert started[0].wait(60) == 2
    assert "process 1 on" in started[0].stdout + started[0].stderr
