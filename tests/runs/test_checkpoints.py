"""--ckpt_path last and auto: the newest whole checkpoint of the experiment, and the one before where it is damaged."""

import os
import shutil
from functools import partial

import pytest
import torch
from conftest import same, state, tiny_task, tiny_trainer, train
from gloo import on_two_processes
from lightning.pytorch.loggers import CSVLogger
from refusals import find_line, refused
from runs import StopAt

from uvit_decay.callbacks import BestCheckpoint, LastCheckpoint
from uvit_decay.data import Digits
from uvit_decay.runs.checkpoints import find_newest, has_newer, list_names, rotate
from uvit_decay.runs.resumable import Start
from uvit_decay.terminal.errors import UserError

TINY = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.limit_val_batches=0", "--trainer.log_every_n_steps=1"]
TINY += ['--trainer.callbacks=[{"class_path": "LastCheckpoint", "init_args": {"every_n_steps": 2}}]']


def run(monkeypatch, caplog, folder, *flags):
    """Run train.py, and return its lines about the checkpoint from which it resumes."""
    caplog.clear()
    train(monkeypatch, folder, "fit", *TINY, *flags)
    (line,) = [text for text in caplog.messages if "--ckpt_path" in text]
    return line.replace(str(folder), "")


def step(path):
    return torch.load(path, weights_only=True)["global_step"]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-5000])


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_one_command_begins_and_ends_a_run(tmp_path, monkeypatch, caplog):
    command = ["--ckpt_path=auto", "--trainer.max_steps=3"]
    folder = tmp_path / "runs" / "digits"
    saved = folder / "version_0" / "checkpoints"
    find_line(run(monkeypatch, caplog, tmp_path, *command), "--ckpt_path auto", "new run", "runs/digits")
    os.utime(saved / "last.ckpt", (0, 0))  # clocks play no part
    (saved / "last.ckpt").rename(saved / "next.ckpt")  # as if killed between the names
    train(monkeypatch, tmp_path, "fit", *TINY, *command)
    find_line(caplog.messages[-1], "step 3", "--trainer.max_steps")
    assert step(saved / "last.ckpt") == 3
    (saved / "last.ckpt").rename(saved / "next.ckpt")
    longer = ["--ckpt_path=auto", "--trainer.max_steps=4", "--data.device_batch_size=16", "--model.compile=false"]
    find_line(run(monkeypatch, caplog, tmp_path, *longer), "runs/digits/version_0/checkpoints/next.ckpt", "step 3")
    assert {path.name: step(path) for path in saved.iterdir()} == {"last.ckpt": 4, "previous.ckpt": 3}
    assert [path.name for path in folder.iterdir()] == ["version_0"]


def test_another_seed_is_another_run_and_last_is_the_newest_of_all(tmp_path, monkeypatch, caplog, capsys):
    command = ["--ckpt_path=auto", "--trainer.max_steps=1"]
    run(monkeypatch, caplog, tmp_path, *command)
    find_line(run(monkeypatch, caplog, tmp_path, *command, "--seed_everything=1"), "new run")
    train(monkeypatch, tmp_path, "validate", *TINY, "--trainer.limit_val_batches=1", "--ckpt_path=last")
    find_line(caplog.messages, "--ckpt_path last", "runs/digits/version_1/checkpoints/last.ckpt", "step 1")
    assert "val/loss" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "damage"), [("last", truncate), ("auto", flip_byte)])
def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_the_run_ends_the_same(tmp_path, name, damage, caplog):
    task = tiny_task()
    tiny_trainer(tmp_path / "whole", max_steps=8).fit(task, Digits(32))
    half = tiny_trainer(tmp_path, LastCheckpoint(every_n_steps=2), StopAt(4), max_steps=8, logger=CSVLogger(tmp_path))
    half.fit(tiny_task(), Digits(32))
    damage(tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt")
    rest, trainer = tiny_task(), tiny_trainer(tmp_path, max_steps=8, logger=CSVLogger(tmp_path))
    found, _ = find_newest(name, {}, (), trainer.loggers, tmp_path)
    (line,) = [text for text in caplog.messages if "ckpt_path" in text]
    assert line.startswith("warning: ")
    find_line(line, "version_0/checkpoints/last.ckpt", "version_0/checkpoints/previous.ckpt", "step 2")
    assert found == tmp_path / "lightning_logs" / "version_0" / "checkpoints" / "previous.ckpt"
    assert not has_newer(tmp_path / "lightning_logs" / "version_0", 2)  # so the run goes on in its folder
    trainer.fit(rest, Digits(32), ckpt_path=found)
    assert same(state(rest), state(task))


def test_what_cannot_go_on_by_name_is_one_line_and_leaves_no_folder(trained, tmp_path, monkeypatch, capsys):
    line = refused(capsys, train, monkeypatch, tmp_path, "fit", *TINY, "--ckpt_path=last")
    find_line(line, "--ckpt_path last", "runs/digits")
    for flags in (["--ckpt_path=auto"], []):
        line = refused(capsys, train, monkeypatch, tmp_path, "validate", *TINY, *flags)
        find_line(line, "validate", "--ckpt_path runs/.../last.ckpt", "--ckpt_path last")
    folder = tmp_path / "runs" / "digits" / "version_3" / "checkpoints"
    folder.mkdir(parents=True)
    shutil.copy(trained, folder / "last.ckpt")
    truncate(folder / "last.ckpt")
    for name in ("last", "auto"):
        line = refused(capsys, train, monkeypatch, tmp_path, "fit", *TINY, f"--ckpt_path={name}")
        find_line(line, f"--ckpt_path {name}", "runs/digits/version_3/")
    assert [path.name for path in (tmp_path / "runs" / "digits").iterdir()] == ["version_3"]


def test_runs_are_ordered_by_number_and_files_by_step(trained, tmp_path):
    def put(run, name, number):
        contents = torch.load(trained, weights_only=True)
        contents["global_step"] = number
        path = tmp_path / run / "checkpoints" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(contents, path)
        return path

    first = put("version_10", "step_00000600.ckpt", 600)
    second = put("version_10", "last.ckpt", 500)
    third = put("version_10", "previous.ckpt", 400)
    fourth = put("version_9", "next.ckpt", 9000)
    fifth = put("version_9", "last.ckpt", 8000)
    (tmp_path / "version_11").mkdir()
    (tmp_path / "version_x").mkdir()
    for expected in (first, second, third, fourth, fifth, None):
        found = find_newest("auto", {}, (), [CSVLogger(tmp_path, name="")], tmp_path)
        assert (found and found[0]) == expected
        if expected:
            expected.unlink()


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_a_kill_between_any_two_renames_leaves_the_newest_under_a_known_name(tmp_path, keep, monkeypatch):
    class Killed(BaseException):
        pass

    rename, left = type(tmp_path).replace, 0

    def count_and_replace(path, target):
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        return rename(path, target)

    monkeypatch.setattr(type(tmp_path), "replace", count_and_replace)
    for kill in range(keep + 1):
        for number in range(10):
            (tmp_path / "next.ckpt").write_text(str(number))
            left = kill if number == 7 else 100
            try:
                rotate(tmp_path, keep)
            except Killed:
                assert number == 7
            kept = [int((tmp_path / name).read_text()) for name in list_names(keep) if (tmp_path / name).exists()]
            assert kept == sorted(kept, reverse=True)
            assert kept[0] == number
            assert len(kept) >= min(keep, number + 1)
        for file in tmp_path.iterdir():
            file.unlink()


def rank_of_two(folder, rank):
    """Return the checkpoint from which each of two ranks resumes, with and without a shared folder."""
    said = []
    for place in (folder / "shared", folder / f"of rank {rank}"):
        place.mkdir(exist_ok=True)
        os.chdir(place)  # paths are relative, and so the same on all nodes
        options = {"logger": CSVLogger("."), "devices": 2, "strategy": "ddp", "limit_val_batches": 1}
        best = BestCheckpoint("val/loss")
        trainer = tiny_trainer(place, best, max_steps=6, val_check_interval=6, **options)
        try:
            found, task = find_newest("auto", {}, (), trainer.loggers, place), tiny_task()
            path = found and found[0]
            task.start = path and Start(path, 4)
            trainer.fit(task, Digits(32), ckpt_path=path)
            step = torch.load(best.best_model_path, weights_only=True)["global_step"]
            said.append(f"{trainer.ckpt_path.name} to {trainer.global_step}, best at {step}")
        except UserError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_all_ranks_resume_from_the_same_checkpoint_or_none_does(programs, tmp_path):
    for place in ("shared", "of rank 0"):
        options = {"max_steps": 6, "logger": CSVLogger(tmp_path / place)}
        tiny_trainer(tmp_path / place, StopAt(4), **options).fit(tiny_task(), Digits(32))
    (shared, first), (shared_too, second) = on_two_processes(programs, partial(rank_of_two, tmp_path), tmp_path)
    assert shared == shared_too == "last.ckpt to 6, best at 6"
    assert first == second
    find_line(first, "ckpt_path")
