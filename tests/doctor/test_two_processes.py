"""The doctor of two processes, started by hand as on two machines, and by torchrun's variables."""

import pytest
from programs import ranks
from refusals import find_line

SMALL = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.max_steps=20", "--trainer.limit_val_batches=0"]
NODES = ["--trainer.num_nodes=2", "--trainer.strategy=ddp"]


def both(programs, folder, *argv, own=((), ()), launched=False):
    """Start the doctor on two nodes by hand, or as torchrun does on one; return both when they have ended."""
    flags, started = ["doctor", *argv, "--trainer.callbacks=[]", *SMALL], []
    for rank, variables in enumerate(ranks()):
        by_hand = {"NODE_RANK": str(rank), **{name: variables[name] for name in ("MASTER_ADDR", "MASTER_PORT")}}
        environment = variables if launched else by_hand
        started.append(programs.start("train.py", *flags, *own[rank], cwd=folder, environment=environment))
    return started, [program.wait() for program in started]


def test_an_error_of_one_node_ends_both(programs, tmp_path):
    lacks = ["--data=uvit_decay.data.Images", "--data.path=/none"]
    started, codes = both(programs, tmp_path, "--config=digits", *NODES, own=((), lacks))
    assert codes == [2, 2], started[0].stdout
    find_line(started[1].stderr, "error: --data.path", "/none")
    assert "error    run: the flag data" in started[0].stdout


@pytest.mark.slow
def test_the_doctor_of_a_sharded_network(programs, tmp_path):
    started, codes = both(programs, tmp_path, *NODES, "--trainer.strategy=fsdp")
    assert codes == [0, 0], [program.stdout + program.stderr for program in started]
    find_line(started[0].stdout, "ok", "memory", "1 x 16")


def test_the_doctor_times_the_steps_of_two_ranks(programs, tmp_path):
    one_node = ["--trainer.devices=2", "--trainer.strategy=ddp", "--model.net.image_size=null"]
    started, codes = both(programs, tmp_path, *one_node, launched=True)
    assert codes == [0, 0], [program.stdout + program.stderr for program in started]
    shown = started[0].stdout
    assert "ok       ranks: 2 = 1 node x 2, started by torchrun" in shown
    find_line(shown, "ok", "memory", "1 x 16")
    assert all(line.startswith("[Gloo] ") for line in started[1].stdout.splitlines())  # torch 2.9's own
    assert not list(tmp_path.iterdir())
