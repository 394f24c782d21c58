"""One program on several processes does what one process does, or ends with a line."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT, sample
from programs import ranks
from refusals import find_line, raises_user_error

from uvit_decay.runtime.distributed import (
    Processes,
    _describe_difference,
    _interface,
    _slurm_nodes,
    batches,
    others_needed,
    set_variables,
)
from uvit_decay.terminal.errors import user_errors

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
REALLY = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]


def run(*command, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [str(word) for word in command]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("count", [1, 11, 64, 65, 200])
@pytest.mark.parametrize("size", [1, 8, 64])
def test_batches_are_all_in_order_and_for_every_process(count, size):
    alone = batches(count, size, 1)
    assert alone == [range(i, min(i + size, count)) for i in range(0, count, size)]
    for many in (2, 3, 8):
        parts = batches(count, size, many)
        assert [i for part in parts for i in part] == list(range(count))
        assert max(map(len, parts)) <= size
        if count >= many * size:
            assert parts == alone
        elif count % many == 0:
            assert len(parts) == many


def test_one_process_works_in_order_and_alone():
    alone = Processes.current()
    assert (alone.rank, alone.size, alone.is_main) == (0, 1, True)
    assert list(alone.map_ordered("abc", str.upper)) == ["A", "B", "C"]
    assert alone.broadcast("a") == "a"


def test_the_setting_that_differs_is_named():
    values = [{"a": [1], "b": None, "c": 1}, {"a": [1], "b": None, "c": 1}, {"a": [2], "b": "x", "c": 1}]
    found = list(zip(("one", "two", "three"), values, strict=True))
    find_line(_describe_difference("settings", found), "settings a", "three (process 2)", "one (process 0)")
    assert _describe_difference("settings", found[:2]) == ""


@pytest.mark.slow
def test_processes_have_their_results_in_order_on_the_first(programs, tmp_path):
    programs.run_ranks(2, "tests/shared/launched.py", "5", "-", str(tmp_path / "r"), cwd=tmp_path)
    found = [json.loads((tmp_path / f"r.{rank}").read_text()) for rank in range(2)]
    assert found[0]["done"] == [[job, job % 2] for job in range(5)]
    assert not found[1]["done"]
    for rank, own in enumerate(found):
        assert own["seen"] == [rank, 2, rank, 2, rank]
        assert own["shared"] == {"from": 0}
        assert not [name for name in own["threads"] if "gloo" in name]  # they would abort Python's exit now and then


@pytest.mark.slow
@pytest.mark.parametrize(("fails", "rank"), [("job 3", 1), ("result 1", 0)])
def test_an_error_on_one_process_ends_all_with_a_line(programs, tmp_path, fails, rank):
    words = ["tests/shared/launched.py", "100", fails, str(tmp_path / "r")]
    pair = [programs.start(*words, cwd=tmp_path, environment=own) for own in ranks()]
    assert [program.wait(60) for program in pair] == [2, 2]
    assert pair[rank].stderr == f"error: {fails} has failed\n"
    find_line(pair[1 - rank].last_line, "error:", "another process")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def one(trained, tmp_path_factory):
    """Return the images and classes of one process."""
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        sample(patch, folder, *small(trained, "--num"), "--out", "one.npz")
    with np.load(folder / "one.npz") as file:
        return file["arr_0"], file["arr_1"]


def small(trained, name, count=11):
    return ["--ckpt", trained, name, count, "--steps", 2, "--batch-size", 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "name", "count"),
    [
        ([*ACCELERATE, "--num_processes", 2, *REALLY], "--num", 11),
        ([*TORCHRUN, 2, "--"], "--num", 11),
        ([*TORCHRUN, 3], "-n", 11),  # torchrun has no such option itself, and needs no -- before the script
        ([*ACCELERATE, "--num_processes", 3, *REALLY], "--num", 2),
    ],
    ids=["accelerate 2", "torchrun 2", "torchrun 3", "accelerate 3, two images"],
)
def test_any_number_of_processes_samples_what_one_does(one, trained, tmp_path, launcher, name, count, exhaustive):
    if not exhaustive and (launcher[-1] != REALLY[-1] or count == 2):
        pytest.skip("a sample: --exhaustive tries torchrun and three processes, too")
    result = run(*launcher, ROOT / "sample.py", *small(trained, name, count), "--out", "many.npz", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("wrote") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["many.npz"]
    with np.load(tmp_path / "many.npz") as file:
        assert np.array_equal(file["arr_0"], one[0][:count])
        assert np.array_equal(file["arr_1"], one[1][:count])


def test_a_second_collective_on_a_lost_network_is_one_line():
    with raises_user_error("Application timeout"), others_needed():
        raise RuntimeError("Application timeout caused pair closure")  # all that gloo says of it


def test_processes_that_are_not_told_where_to_meet_end_with_one_line(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a launcher that does not say where the first process is
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as stop, user_errors(), Processes.launch():
        pass
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    find_line(line, "error:", "another process", "RANK")


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with raises_user_error("2 processes", "1 GPUs"), Processes.launch():
        pass


@pytest.mark.parametrize(("visible", "local_rank", "expected"), [(1, 3, 0), (4, 3, 3)])
def test_a_process_takes_its_gpu(monkeypatch, visible, local_rank, expected):
    chosen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: visible)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    monkeypatch.setattr(Processes, "current", lambda: Processes(local_rank, 4, local_rank))
    with Processes.launch():
        pass
    with Processes.launch(device="cpu"):  # takes none
        pass
    assert chosen == [expected]


def test_a_process_without_a_gpu_of_its_own_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(Processes, "current", lambda: Processes(2, 4, 2))
    with raises_user_error("LOCAL_RANK"), Processes.launch():
        pass


def test_an_interface_is_known_by_its_address():
    assert _interface("127.0.0.1") == "lo"
    assert _interface("198.51.100.1") is None  # for documentation, of no machine


@pytest.mark.parametrize(
    ("nodes", "first", "last"),
    [("gpu[07-09,12]", "gpu07", "gpu12"), ("a1,a2,b[3-4]", "a1", "b4"), ("alone", "alone", "alone")],
)
def test_tasks_of_srun_meet_on_their_first_node(monkeypatch, nodes, first, last):
    job = {"JOB_ID": "1234567", "STEP_NUM_TASKS": "4", "PROCID": "3", "STEP_NODELIST": nodes}
    monkeypatch.setattr(os, "environ", {f"SLURM_{name}": value for name, value in job.items()})
    set_variables()
    expected = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": first, "MASTER_PORT": "19567"}
    assert {name: os.environ[name] for name in expected} == expected
    assert _slurm_nodes() == [first, last]
