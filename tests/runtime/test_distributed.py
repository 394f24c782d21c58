"""One program on several processes does what one process does, or ends with a line."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import ROOT
from sample_script import sample

from uvit_decay.runtime.distributed import Processes, batches
from uvit_decay.runtime.errors import UserError, user_errors

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
REALLY = ["--multi_gpu", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]


def run(*command, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [str(word) for word in command]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)


def errors(result):
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("count", [1, 2, 11, 63, 64, 65, 200, 1000])
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
    alone.end()


def test_results_come_before_the_next_job_is_begun():
    begun = []
    results = Processes.current().map_ordered([1, 2, 3], begun.append)
    next(results)
    assert begun == [1]


@pytest.mark.slow
def test_three_processes_have_their_results_in_order_on_the_first(tmp_path):
    result = run(*TORCHRUN, 3, ROOT / "tests" / "shared" / "launched.py", 8, "-", tmp_path / "r", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    ranks = [json.loads((tmp_path / f"r.{rank}").read_text()) for rank in range(3)]
    assert ranks[0]["done"] == [[job, job % 3] for job in range(8)]
    for rank, found in enumerate(ranks):
        assert found["seen"] == [rank, 3, rank, 3, rank]
        assert found["shared"] == {"from": 0}
        assert not [name for name in found["threads"] if "gloo" in name]  # they would abort Python's exit now and then
        assert rank == 0 or not found["done"]


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["job 3", "result 1"])  # on the second process in its second round; on the first
def test_an_error_on_one_process_ends_all_with_its_line(tmp_path, fails):
    start = time.monotonic()
    result = run(*TORCHRUN, 2, ROOT / "tests" / "shared" / "launched.py", 100, fails, tmp_path / "r", cwd=tmp_path)
    assert result.returncode != 0
    assert time.monotonic() - start < 60
    assert f"error: {fails} has failed" in errors(result)
    assert result.stderr.count("Traceback") == 1  # torchrun's own
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def one(trained, tmp_path_factory):
    """What one process makes: images, classes."""
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
        ([*TORCHRUN, 2, "--"], "--num", 11),
        ([*TORCHRUN, 3], "-n", 11),  # torchrun has no such option itself, and needs no -- before the script
        ([*ACCELERATE, "--num_processes", 2, *REALLY], "--num", 11),
        ([*ACCELERATE, "--num_processes", 3, *REALLY], "--num", 2),
    ],
    ids=["torchrun 2", "torchrun 3", "accelerate 2", "accelerate 3, two images"],
)
def test_any_number_of_processes_samples_what_one_does(one, trained, tmp_path, launcher, name, count, exhaustive):
    if (name, count) in (("-n", 11), ("--num", 2)) and not exhaustive:
        pytest.skip("a sample: --exhaustive tries three processes, too")
    many = next(word for word in launcher if isinstance(word, int))
    options = [*small(trained, name, count), "--processes", many]
    result = run(*launcher, ROOT / "sample.py", *options, "--out", "many.npz", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("wrote") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["many.npz"]
    with np.load(tmp_path / "many.npz") as file:
        assert np.array_equal(file["arr_0"], one[0][:count])
        assert np.array_equal(file["arr_1"], one[1][:count])


@pytest.mark.slow
def test_accelerate_that_starts_one_process_for_two_is_refused(trained, tmp_path):
    command = [*ACCELERATE, "--num_processes", 2, "--cpu", ROOT / "sample.py", *small(trained, "--num")]
    result = run(*command, "--out", "never.npz", cwd=tmp_path)
    assert result.returncode != 0
    (line,) = errors(result)
    assert "accelerate launch has started one process, perhaps of several" in line
    assert "accelerate launch --multi_gpu --num_processes P --num_machines 1" in line
    assert not list(tmp_path.iterdir())


def test_a_single_process_of_accelerate_needs_the_number_that_was_wanted(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(UserError, match="accelerate launch has started one process"):
        Processes()._check(None)
    with pytest.raises(UserError, match="--processes asks for 2 processes, but this program has 1") as raised:
        Processes()._check(2)
    assert "accelerate launch --multi_gpu --num_processes 2 --num_machines 1" in str(raised.value)
    Processes()._check(1)
    Processes(1, 2)._check(None)  # accelerate starts several through torchrun, which sets WORLD_SIZE


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_fewer_processes_than_the_environment_says_are_refused_unless_so_wanted(name, monkeypatch):
    monkeypatch.setenv(name, "2")
    with pytest.raises(UserError, match="asks for 2 processes, but this program has 1: start it with `torchrun"):
        Processes()._check(None)
    Processes()._check(1)
    Processes(1, 2)._check(None)
    with pytest.raises(UserError, match="--processes asks for 3 processes, but this program has 2"):
        Processes(1, 2)._check(3)
    with pytest.raises(UserError, match="has 2: start it with python"):
        Processes(1, 2)._check(1)


def test_processes_that_cannot_meet_are_one_line(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a launcher that does not say where the first process is
    with pytest.raises(SystemExit) as stop, user_errors():
        Processes.launched()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the processes of this program cannot meet")


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    Processes(1, 2)._check(None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(UserError, match="2 processes on a machine with 1 GPU"):
        Processes(1, 2)._check(None)
