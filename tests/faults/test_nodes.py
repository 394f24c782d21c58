"""Two nodes of which one fails, or is started wrongly: all processes end, with one line that says why."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator

import pytest
from programs import Program
from refusals import find_line
from two_nodes import TwoNodes, can_isolate, two_nodes

ISOLATED = can_isolate()
ENDLESS = ["--trainer.max_steps=1000000", "--trainer.limit_val_batches=0", "--trainer.log_every_n_steps=5"]
SMALL = ["--model.net.dim=16", "--model.net.depth=2", "--model.sampling.steps=3"]
NODES = ["--trainer.num_nodes=2", "--trainer.enable_progress_bar=false"]
STRATEGY, TIMEOUT = "uvit_decay.tasks.parallel.ddp.Replicated", "--trainer.strategy.init_args.timeout=0:00:"
FIT = ["train.py", "fit", *SMALL, *NODES, f"--trainer.strategy={STRATEGY}", f"{TIMEOUT}30"]
LOST = "another process"
Start = Callable[..., list[Program]]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Iterator[TwoNodes]:
    with two_nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture
def start(two, programs, tmp_path) -> Start:
    """Return a function that starts a command on both nodes, or on some, with environment variables."""

    def started(*words: object, only: tuple[int, ...] = (0, 1), seconds: float = 0, **variables: str) -> list[Program]:
        impatient = ["tests/shared/surroundings.py", f"impatient={seconds}"] if seconds else []
        command = [str(word) for word in (*impatient, *words)]
        ranks = [{"RANK": str(i), "WORLD_SIZE": "2", "LOCAL_RANK": "0"} if "fit" not in command else {} for i in (0, 1)]
        return [
            programs.start(
                *command,
                cwd=tmp_path,
                environment={**{k: str(v) for k, v in two.variables(two.nodes[i]).items()}, **ranks[i], **variables},
                inside=two.nodes[i].pid,
            )
            for i in only
        ]

    return started


def ends(program: Program, *words: str) -> None:
    """Check that the program ends soon with one line that has these words."""
    assert program.wait(60) == 2, program.stderr
    assert "Traceback" not in program.stderr, program.stderr
    (line,) = [line for line in program.stderr.splitlines() if line.startswith("error: ")]
    find_line(line, *words)


@pytest.mark.skipif(not ISOLATED, reason="loopback has no cable")
def test_a_lost_network_ends_both_within_the_timeout(two, start, tmp_path, exhaustive):
    """Nobody hears that a connection has ended."""
    if not exhaustive:
        pytest.skip("a sample: --exhaustive loses the network, too")
    programs = start(*FIT, *ENDLESS, f"{TIMEOUT}09")
    end = time.monotonic() + 120
    while not any(len(log.read_text().splitlines()) > 2 for log in tmp_path.glob("runs/*/*/metrics.csv")):
        assert time.monotonic() < end, programs[1].stderr
        time.sleep(0.05)
    two.nodes[1].plug("down")
    try:
        for program in programs:
            ends(program, LOST)  # that it timed out, in one of two wordings of gloo
    finally:
        two.nodes[1].plug()


def test_nodes_that_do_not_meet_end_within_the_timeout(start, trained):
    (alone,) = start(*FIT, f"{TIMEOUT}03", only=(0,))
    ends(alone, LOST, "1/2 clients joined")
    (alone,) = start("sample.py", "--ckpt", trained, "--out", "four.npz", only=(1,), seconds=2)
    ends(alone, LOST)


def test_two_nodes_with_one_number_end(start):
    for program in start(*FIT, f"{TIMEOUT}05", NODE_RANK="0"):
        ends(program, LOST)


def test_nodes_that_are_started_with_other_flags_end(start):
    programs = [*start(*FIT, only=(0,)), *start(*FIT, "--data.batch_size=16", only=(1,))]
    for program in programs:
        ends(program, "data.batch_size")


@pytest.mark.skipif(not ISOLATED, reason="the nodes see the same files")
def test_nodes_that_see_other_files_end(two, start, tmp_path, trained, image_dir, vae):
    """Shards of latents are written on both nodes; a checkpoint is read on both."""
    images, out, copy = tmp_path / "images", tmp_path / "latents", tmp_path / "last.ckpt"
    shutil.copytree(image_dir, images)
    shutil.copyfile(trained, copy)
    out.mkdir()
    other = tmp_path / "other.ckpt"
    other.write_bytes(trained.read_bytes() + b"\0")
    two.nodes[1].mount("-t", "tmpfs", "none", out)
    two.nodes[1].mount("--bind", other, copy)
    encode = ["-m", "uvit_decay", "encode", images, out, "--vae", vae, "--image-size", 32]
    for program in start(*encode):
        ends(program, str(out), "node1")
    for program in start("sample.py", "--ckpt", copy, "--num", 4, "--out", "four.npz"):
        ends(program, str(copy), "node1 (process 1)", "node0 (process 0)")
    two.nodes[1].unmount(out)
    cats = image_dir / "cat"
    two.nodes[1].mount("--bind", cats, images / "dog")
    for program in start(*encode):
        ends(program, str(images), "node1 (process 1)")
