"""A run is one folder: launches of the same command go on in it, and everything else gets a folder of its own."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from subprocess import PIPE

import pytest
import torch
from conftest import train
from lightning.pytorch.loggers import WandbLogger
from refusals import find_line, refused
from small_training import rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from uvit_decay.files.writing import claim_paths
from uvit_decay.runs import RunLogger
from uvit_decay.runs import folder as run_folders
from uvit_decay.runs.history import read_rows
from uvit_decay.runs.launch import read_launches
from uvit_decay.runs.loggers import continue_records

TINY = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.log_every_n_steps=1", "--trainer.limit_val_batches=1"]
TINY += ["--trainer.val_check_interval=4", '--trainer.callbacks=[{"class_path": "EMA"}]']
TINY += ["--trainer.callbacks+=LastCheckpoint", "--trainer.callbacks.every_n_steps=2"]
CSV = ["--trainer.logger+=CSVLogger", "--trainer.logger.save_dir=csv"]


def fit(monkeypatch, folder, steps, *flags, ckpt_path="auto"):
    """Launch a run of this number of steps; return its experiment's folder."""
    train(monkeypatch, folder, "fit", *TINY, f"--ckpt_path={ckpt_path}", f"--trainer.max_steps={steps}", *flags)
    return folder / "runs" / "digits"


def step(run):
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]


def trained_steps(log):
    """Return the steps of a metrics.csv that have a training loss, in the order of the rows."""
    return [step for step, values in read_rows(log) if "train/loss" in values]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Return the folder of a run of 12 steps in three launches; the second one lacks the last save of the first."""
    folder = tmp_path_factory.mktemp("launched")
    with pytest.MonkeyPatch.context() as patch:
        run = fit(patch, folder, 4, *CSV) / "version_0"
        (run / "checkpoints" / "last.ckpt").unlink()  # as if killed after step 4 and before its checkpoint
        (run / "checkpoints" / ".last.ckpt.01234567.partial").write_text("of a killed program")
        fit(patch, folder, 8, *CSV)
        fit(patch, folder, 12, *CSV)
    return folder


def test_launches_of_one_command_share_a_folder(launched, tmp_path, monkeypatch):
    (run,) = (launched / "runs" / "digits").iterdir()
    assert step(run) == 12
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"last.ckpt", "previous.ckpt"}
    assert not (run / ".lock").exists()
    whole = fit(monkeypatch, tmp_path, 12) / "version_0"
    assert rows(run) == rows(whole)
    launches = read_launches(run)
    assert [launch.step for launch in launches] == [0, 2, 8]
    changed = [{}, {"trainer.max_steps": [4, 8]}, {"trainer.max_steps": [8, 12]}]
    assert [launch.changes for launch in launches] == changed
    assert {launch.parent for launch in launches} == {None}
    assert torch.__version__.startswith(launches[0].versions["torch"])
    assert launches[0].machine["processes"] == 1


def test_every_logger_goes_on_where_it_was(launched):
    (log,) = launched.rglob("csv/**/metrics.csv")
    (run,) = (launched / "runs" / "digits").iterdir()
    for path in (log, run / "metrics.csv"):
        assert trained_steps(path) == list(range(12))
    assert len([*run.glob("events.out.*")]) == 3
    events = EventAccumulator(str(run))
    events.Reload()
    counts = Counter(event.step for event in events.Scalars("train/loss"))
    assert counts.keys() == set(range(12))
    assert {number for number, count in counts.items() if count > 1} <= {2}  # the step that a kill cut off may be twice


@pytest.fixture
def copied(launched, tmp_path):
    shutil.copytree(launched / "runs", tmp_path / "runs")
    return tmp_path / "runs" / "digits" / "version_0"


def test_an_older_checkpoint_begins_a_run_of_its_own_and_the_old_one_can_go_on(copied, tmp_path, monkeypatch):
    before = contents(copied)
    fit(monkeypatch, tmp_path, 12, ckpt_path=copied / "checkpoints" / "previous.ckpt")
    child = copied.parent / "version_1"
    assert contents(copied) == before
    assert rows(child) == rows(copied)
    (launch,) = read_launches(child)
    assert (launch.step, launch.parent) == (10, str(copied / "checkpoints" / "previous.ckpt"))
    fit(monkeypatch, tmp_path, 14, ckpt_path=copied / "checkpoints" / "last.ckpt")
    assert (step(copied), step(child)) == (14, 12)
    assert {path.name for path in copied.parent.iterdir()} == {"version_0", "version_1"}


def test_a_setting_that_is_allowed_begins_a_run_that_the_same_command_goes_on_with(copied, tmp_path, monkeypatch):
    before = contents(copied)
    flags = ["--model.optim.lr=1e-5", "--resume.allow=model.optim.lr"]
    for steps in (14, 16):
        fit(monkeypatch, tmp_path, steps, *flags)
    assert contents(copied) == before
    child = copied.parent / "version_1"
    first, second = read_launches(child)
    assert first.changes["model.optim.lr"] == [0.003, 1e-5]
    assert first.parent == "runs/digits/version_0/checkpoints/last.ckpt"
    assert (second.step, second.parent, second.changes) == (14, None, {"trainer.max_steps": [14, 16]})
    assert trained_steps(child / "metrics.csv") == list(range(16))


def test_a_checkpoint_from_elsewhere_begins_a_run(copied, tmp_path, monkeypatch):
    before = contents(copied)
    fit(monkeypatch, tmp_path, 13, "--trainer.logger.experiment=other", ckpt_path=copied / "checkpoints" / "last.ckpt")
    assert contents(copied) == before
    assert trained_steps(tmp_path / "runs" / "other" / "version_0" / "metrics.csv") == list(range(13))


HOLD = "import filelock, sys; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(flush=True); input()"


@pytest.mark.parametrize("killed", [False, True])
def test_a_folder_in_use_is_waited_for_and_a_killed_program_frees_it(
    killed, copied, tmp_path, monkeypatch, capsys, caplog
):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, copied / ".lock"], stdin=PIPE, stdout=PIPE)
    try:
        holder.stdout.readline()
        before = contents(copied)
        if killed:
            free = run_folders.rank_zero_info
            monkeypatch.setattr(run_folders, "rank_zero_info", lambda line: (free(line), holder.kill()))
            fit(monkeypatch, tmp_path, 13)
            assert step(copied) == 13
        else:
            monkeypatch.setattr(run_folders, "WAIT", 0.1)
            find_line(refused(capsys, fit, monkeypatch, tmp_path, 13), "version_0", "--ckpt_path")
            assert contents(copied) == before
        find_line(caplog.messages, "version_0", f"{run_folders.WAIT:g} s")
    finally:
        holder.kill()
        holder.communicate()


def test_what_a_kill_in_the_first_checkpoint_left_is_removed_by_the_same_command(tmp_path, monkeypatch):
    partials = []
    for version in (0, 1):
        partial = tmp_path / "runs" / "digits" / f"version_{version}" / "checkpoints" / ".next.ckpt.01234567.partial"
        partial.parent.mkdir(parents=True)
        partial.touch()
        partials.append(partial)
    with claim_paths(partials[1].parents[1]):  # another program writes it
        fit(monkeypatch, tmp_path, 2)
    assert [partial.exists() for partial in partials] == [False, True]
    assert step(tmp_path / "runs" / "digits" / "version_2") == 2


class Wandb(WandbLogger):
    """W&B's logger without W&B."""

    def __init__(self, id=None):
        self._id, self._wandb_init = id, {"id": id}


@pytest.mark.parametrize("given", [None, "mine"])
def test_wandb_goes_on_with_its_id(given, tmp_path):
    logger = Wandb(given)
    run = tmp_path / "x" / "version_0"
    continue_records([RunLogger("x", str(tmp_path)), logger], run, {"Wandb": "of the run"}, 4)
    assert logger._wandb_init["id"] == (given or "of the run")


def test_damaged_launches_are_one_line(copied, tmp_path, monkeypatch, capsys):
    (copied / "launches.jsonl").write_text(json.dumps({"step": 1}))
    find_line(refused(capsys, fit, monkeypatch, tmp_path, 13), "launches.jsonl", "line 1")
