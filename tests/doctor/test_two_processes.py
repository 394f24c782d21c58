"""The doctor of two processes, started by hand as on two machines, and by torchrun's variables."""

import json
import socket

import pytest

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


def test_an_error_of_one_node_ends_both(programs, tmp_path):
    lacks = ["--data=uvit_decay.data.Images", "--data.path=/none"]
    started, codes = both(programs, [tmp_path] * 2, "doctor", own=((), lacks))
    assert codes == [2, 2], started[0].stdout
    assert "error: /none: no such folder" in started[1].stderr
    assert "error    run: the flag data" in started[0].stdout


@pytest.mark.slow
def test_the_doctor_of_a_sharded_network(programs, tmp_path):
    sharded = ["--trainer.strategy=fsdp"]
    started, codes = both(programs, [tmp_path] * 2, "doctor", own=(sharded, sharded))
    assert codes == [0, 0], started[0].stderr + started[0].stdout
    assert "ok       memory: a step of 1 x 16 images takes" in started[0].stdout


def test_the_doctor_times_the_steps_of_two_ranks(programs, tmp_path):
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
    assert findings["ranks"].startswith("2 = 1 node x 2, started by torchrun")
    assert "a step of 1 x 16 images" in findings["memory"]
    assert started[1].stdout == ""
    assert not list(tmp_path.iterdir())
