"""Findings of one process: versions, weights, disks, launchers, and the cost of a step and of the run."""

import math
from contextlib import nullcontext

import pytest
from conftest import tiny_task, tiny_trainer
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from refusals import raises_user_error

from uvit_decay.callbacks import EMA, BestCheckpoint, GenerationMetrics, LastCheckpoint, Preview
from uvit_decay.commands.train.parser import check_nodes
from uvit_decay.data import Digits, Latents
from uvit_decay.doctor import Finding, Plan, Report
from uvit_decay.doctor.cost import (
    _count_validations,
    check_average,
    check_disk,
    check_memory,
    check_warmup,
    checkpoint_bytes,
    count_checkpoints,
    estimate_callbacks,
    estimate_length,
    initial_share,
)
from uvit_decay.doctor.environment import check_weights
from uvit_decay.doctor.rehearsal import Measurements, Rehearsal, rehearse, state_bytes
from uvit_decay.encoders import Inception
from uvit_decay.tasks.optim.options import Optimization

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
BY_HAND = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0"}


def run_of(folder, *callbacks, data=None, task=None, **options):
    """Return a run that has not started; its data are loaded."""
    data = data or Digits(32)
    data.load()
    return Plan(tiny_trainer(folder, *callbacks, **options), task or tiny_task(), data)


def test_a_report_counts_and_exits_by_its_errors(capsys):
    report = Report()
    report.add([Finding("ok", "a", "b"), Finding("warning", "c", "two\nlines", "--flag")])
    assert report.close() == 0
    report.add([Finding("error", "d", "e")])
    assert report.close() == 2
    lines = ["ok       a: b", "warning  c: two lines; --flag", "0 errors, 1 warning"]
    assert capsys.readouterr().out.splitlines() == [*lines, "error    d: e", "1 error, 1 warning"]


def test_networks_that_are_not_here_are_named(tmp_path, encoded, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    callback = GenerationMetrics(Inception())
    (missing,) = check_weights(run_of(tmp_path, GenerationMetrics(Inception(), allow_few=True)))
    assert missing.level == "warning"
    assert missing.text.startswith(f"GenerationMetrics needs Inception's weights ({tmp_path}/hub/checkpoints/")

    latents = run_of(tmp_path, callback, data=Latents(str(encoded)))
    assert len(list(check_weights(latents))) == 1  # the autoencoder is a folder, and there
    object.__setattr__(latents.data.latents, "vae", "somebody/no-such-vae")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [finding.level for finding in check_weights(latents)] == ["warning", "error"]
    assert [finding.level for finding in check_weights(run_of(tmp_path, callback))] == ["ok"]  # too few digits


@pytest.mark.parametrize("callbacks", [[EMA(0.9)], []])
def test_a_checkpoint_has_the_size_that_was_computed(tmp_path, callbacks):
    task, trainer = tiny_task(), tiny_trainer(tmp_path, *callbacks, max_steps=4)
    trainer.fit(task, Digits(32))
    computed = checkpoint_bytes(task, trainer.callbacks, state_bytes(trainer.optimizers[0]))
    actual = (tmp_path / "checkpoints" / "last.ckpt").stat().st_size
    tensors = 12 * len(list(task.net.parameters()))
    assert 0 < actual - computed < 32_768 + 1024 * tensors  # names, headers and counts


def test_a_rehearsal_makes_a_step_however_long_it_takes(tmp_path):
    run = run_of(tmp_path, data=Digits(32, device_batch_size=8))
    rehearsal = Rehearsal(run, most=0.0)
    found = rehearse(run, lambda callbacks: tiny_trainer(tmp_path, *callbacks, max_steps=3), rehearsal)
    assert 0 < found.counted < 2
    sizes = [parameter.numel() for parameter in run.task.parameters()]
    assert found.moments == 4 * (2 * sum(sizes) + len(sizes))  # AdamW's two moments and step counts


def test_a_callback_that_cannot_be_copied_is_named(tmp_path):
    holder = LambdaCallback()
    holder.file = (tmp_path / "lines").open("w")
    run = run_of(tmp_path, holder)
    with holder.file, raises_user_error("LambdaCallback", "cannot be copied"):
        rehearse(run, lambda callbacks: tiny_trainer(tmp_path, *callbacks, max_steps=1), Rehearsal(run))


def test_checkpoints_that_stay_are_counted():
    assert count_checkpoints([LastCheckpoint(keep_every_n_steps=100)], 250, 1000) == 1 + 8  # 300 to 1000
    assert count_checkpoints([LastCheckpoint()], 0, math.inf) == 2  # last.ckpt and previous.ckpt
    assert count_checkpoints([LastCheckpoint(100, keep_last=3)], 0, 1000) == 3
    assert count_checkpoints([BestCheckpoint("fd"), BestCheckpoint("val/loss"), LastCheckpoint()], 0, 1000) == 4
    assert count_checkpoints([], 0, 1000) == 0


def test_a_run_without_an_end_is_a_note_and_its_checkpoints_are_a_warning(tmp_path):
    run = run_of(tmp_path, LastCheckpoint(keep_every_n_steps=10), max_steps=-1)
    (finding,) = estimate_length(run, Measurements(step=1.0, epoch=44))
    assert (finding.level, finding.flag) == ("note", "--trainer.max_steps")
    assert [finding.level for finding in check_disk(run, Measurements())] == ["warning", "ok"]


@pytest.mark.parametrize(
    ("share", "level", "flag"),
    [(0.5, "ok", ""), (0.95, "warning", "--data.device_batch_size 8"), (1.5, "error", "--data.device_batch_size 8")],
)
def test_memory_against_the_device(tmp_path, share, level, flag):
    found = Measurements(limit=2**30, peak=int(share * 2**30), images=16)
    (finding,) = check_memory(run_of(tmp_path), found)
    assert finding.level == level
    assert finding.flag.startswith(flag)


@pytest.mark.parametrize("interval", ["00:00:00:20", 10])
def test_validations_at_intervals_of_steps_or_time_are_counted(tmp_path, interval):
    validations = {"val_check_interval": interval, "limit_val_batches": 1, "check_val_every_n_epoch": None}
    run = run_of(tmp_path, max_steps=100, **validations)
    assert _count_validations(run, Measurements(step=2.0, epoch=44, total=100)) == 10


@pytest.mark.parametrize(
    ("total", "epoch", "options", "flag"),
    [
        (60, 10, {}, "`warmup_steps` 6"),
        (60, 10, {"warmup_epochs": 6}, "`warmup_epochs` 0.6"),
        (60, 10, {"warmup_steps": 59}, None),
        (math.inf, 10, {}, None),
    ],
)
def test_a_run_within_its_warm_up_is_a_warning(tmp_path, total, epoch, options, flag):
    run = run_of(tmp_path)
    run.task.optim = Optimization(**options)
    found = [finding.flag for finding in check_warmup(run, Measurements(total=total, epoch=epoch))]
    assert found == [flag] * (flag is not None)


@pytest.mark.parametrize(
    ("options", "total", "flag"),
    [
        ({"ramp": False}, 60, "decay 0.93"),
        ({"ramp_steps": 1}, 60, "ramp_steps null"),
        ({"decay": 0.93, "ramp": False}, 60, None),
        ({}, 60, None),
        ({"ramp": False}, math.inf, None),
    ],
)
def test_an_average_of_initial_weights_is_a_warning(tmp_path, options, total, flag):
    findings = list(check_average(run_of(tmp_path, EMA(**options)), Measurements(total=total)))
    assert [flag in finding.flag for finding in findings] == [True] * (flag is not None)


def test_a_callback_that_never_runs_is_a_warning(tmp_path):
    callback = Preview(every_n_steps=500, at_end=False, rows=1)
    run = run_of(tmp_path, callback)
    found = rehearse(run, lambda callbacks: tiny_trainer(tmp_path, *callbacks, max_steps=3), Rehearsal(run))
    (finding,) = estimate_callbacks(run, found)
    assert finding.level == "warning"
    assert "every_n_steps 1 " in finding.flag


def check_trainer(monkeypatch, devices, nodes, environment):
    """Check a trainer in an environment; its strategy is ddp if there are several processes."""
    for name, word in environment.items():
        monkeypatch.setenv(name, word)
    strategy = "ddp" if devices * nodes > 1 else "auto"
    check_nodes(Trainer(accelerator="cpu", devices=devices, num_nodes=nodes, strategy=strategy, logger=False))


@pytest.mark.parametrize(
    ("devices", "nodes", "environment", "text"),
    [
        (1, 1, {}, ""),
        (2, 2, TORCHRUN, ""),
        (1, 2, BY_HAND, ""),
        (1, 2, TORCHRUN, ("torchrun", 4, 2)),
        (2, 1, {"WORLD_SIZE": "4"}, ("torchrun", 4, 2)),
        (1, 2, {}, ("2 x 1", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")),
    ],
)
def test_variables_that_disagree_are_one_line(monkeypatch, devices, nodes, environment, text):
    for name in BY_HAND:
        monkeypatch.delenv(name, raising=False)
    with raises_user_error(text) if text else nullcontext():
        check_trainer(monkeypatch, devices, nodes, environment)


@pytest.mark.parametrize(
    ("updates", "arguments", "share"),
    [(60, (0.9999, False), 0.994), (2, (0.9999,), 0.1 * 2 / 11), (60, (0.9,), 0.0), (0, (0.9,), 1.0)],
)
def test_the_share_of_the_initial_weights_is_the_product_of_the_decays(updates, arguments, share):
    assert initial_share(updates, *arguments) == pytest.approx(share, abs=1e-3)
