"""What a run that goes on takes from its checkpoint, what from its flags, and what it refuses."""

import csv

import pytest
import torch
from conftest import tiny_net, tiny_task, tiny_trainer, train
from lightning.pytorch.loggers import CSVLogger
from runs import StopAt, fit

from uvit_decay.data import Digits
from uvit_decay.errors import UserError
from uvit_decay.tasks.base import Optimization

TINY = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.callbacks=[]", "--trainer.limit_val_batches=0"]


def rates(path):
    with path.open() as file:
        return [float(row["train/lr"]) for row in csv.DictReader(file) if row["train/lr"]]


def said(caplog):
    return [text for text in caplog.messages if "other settings" in text]


def test_flags_of_the_optimizer_win_over_a_checkpoint_and_the_run_says_so(trained, tmp_path, monkeypatch, caplog):
    flags = ["--model.optim.lr=1e-5", "--model.optim.schedule=constant", "--model.optim.warmup_steps=14"]
    flags += ["--trainer.max_steps=16", "--trainer.log_every_n_steps=1", f"--ckpt_path={trained}", *TINY]
    with caplog.at_level("INFO"):
        train(monkeypatch, tmp_path, "fit", *flags)
    found = rates(tmp_path / "runs" / "digits" / "version_0" / "metrics.csv")
    assert found == pytest.approx([1e-5 * 13 / 14, 1e-5, 1e-5, 1e-5])
    assert said(caplog) == ["other settings than the checkpoint's: lr 1e-05 (was 0.001)"]


def test_betas_weight_decay_and_fusion_are_those_of_this_run(tmp_path):
    fit(tmp_path / "a", max_steps=3)
    task = tiny_task()
    task.optim = Optimization(1e-3, (0.5, 0.6), 0.1, warmup_steps=10)
    trainer = tiny_trainer(tmp_path / "b", max_steps=5, gradient_clip_val=1.0)
    trainer.fit(task, Digits(32), ckpt_path=tmp_path / "a" / "checkpoints" / "last.ckpt")
    (group,) = trainer.optimizers[0].param_groups
    assert (group["betas"], group["weight_decay"], group["fused"]) == ((0.5, 0.6), 0.1, False)
    assert {int(state["step"]) for state in trainer.optimizers[0].state.values()} == {5}


def test_a_longer_cosine_is_followed_from_the_first_step_on(tmp_path):
    whole = fit(tmp_path / "half", StopAt(6), max_steps=8, task=tiny_task(schedule="cosine"))
    assert len(whole[0]) == 6
    logger = CSVLogger(tmp_path, name="rest")
    options = {"logger": logger, "log_every_n_steps": 1, "task": tiny_task(schedule="cosine")}
    fit(tmp_path / "rest", max_steps=20, ckpt_path=tmp_path / "half" / "checkpoints" / "last.ckpt", **options)
    optim = Optimization(1e-3, warmup_steps=10, schedule="cosine")
    found = rates(tmp_path / "rest" / "version_0" / "metrics.csv")
    assert found == pytest.approx([1e-3 * optim.factor(step, 20) for step in range(6, 20)])


def test_every_other_difference_is_said_in_one_line(tmp_path, monkeypatch, caplog):
    flags = ["--trainer.max_steps=2", *TINY, "--trainer.callbacks+=uvit_decay.callbacks.LastCheckpoint"]
    train(monkeypatch, tmp_path, "fit", *flags)
    path = "runs/digits/version_0/checkpoints/last.ckpt"
    with caplog.at_level("INFO"):
        train(monkeypatch, tmp_path, "fit", *flags, f"--ckpt_path={path}", "--trainer.max_steps=3")
    assert said(caplog) == ["other settings than the checkpoint's: trainer.max_steps 3 (was 2)"]
    caplog.clear()
    more = ["--data.batch_size=16", "--seed_everything=1", "--model.label_dropout=0.2", "--model.optim.betas=[0.8,0.9]"]
    with caplog.at_level("INFO"):
        train(monkeypatch, tmp_path, "fit", *flags, f"--ckpt_path={path}", "--trainer.max_steps=3", *more)
    (line,) = said(caplog)
    changed = ["data.batch_size 16 (was 32)", "seed_everything 1 (was 0)", "model.label_dropout 0.2 (was 0.1)"]
    for change in (*changed, "model.optim.betas [0.8, 0.9] (was [0.9, 0.99])", "trainer.max_steps 3 (was 2)"):
        assert change in line
    assert line.count("was") == 5


@pytest.mark.parametrize("command", ["fit", "validate"])
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--model.net.heads=4", "was trained with net.heads 2, this run has 4: set --model.net.heads 2"),
        ("--model.net.time_scale=1000", "was trained with net.time_scale 999.0, this run has 1000.0: set"),
        ("--model.net.dim=32", "was trained with net.dim 16, this run has 32: set --model.net.dim 16"),
        ("--model.net.alpha_min=1.0", "was trained with net.alpha_min 0.7, this run has 1.0: set"),
        ("--model.prediction=x", "was trained with prediction eps, this run has x: set --model.prediction eps"),
        ("--model.path.beta_max=10", "was trained with path.beta_max 20.0, this run has 10.0: set"),
        ("--model.path=Linear", "was trained with path uvit_decay.diffusion.path.VP, this run has"),
        ("--model.weighting=likelihood", "was trained with weighting none, this run has likelihood: set"),
    ],
)
def test_another_function_of_the_same_shapes_is_refused(trained, tmp_path, monkeypatch, capsys, command, flag, message):
    with pytest.raises(SystemExit) as stop:
        train(monkeypatch, tmp_path, command, *TINY, f"--ckpt_path={trained}", flag)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not list((tmp_path / "runs").rglob("*.yaml"))


def edited(path, target, edit):
    """A copy of a checkpoint after `edit` of its contents."""
    contents = torch.load(path, weights_only=True)
    edit(contents)
    torch.save(contents, target)
    return target


def test_old_names_and_left_out_arguments_are_the_same_function(trained, tmp_path):
    def age(contents):
        description = contents["uvit_decay"]
        description["net"]["class_path"] = "uvit_decay.nn.UViT"
        for name in ("time_scale", "branches", "skip", "schedule"):
            del description["net"]["init_args"][name]
        description["net"]["init_args"]["zero_init"] = True  # only how it once began
        del description["weighting"], contents["settings"]

    path = edited(trained, tmp_path / "old.ckpt", age)
    assert len(fit(tmp_path / "run", max_steps=13, ckpt_path=path)[0]) == 1
    with pytest.raises(
        UserError, match=r"trained with net.time_scale 999.0, this run has 1000.0: set --model.net.time"
    ):
        fit(tmp_path / "run", max_steps=13, ckpt_path=path, task=tiny_task(tiny_net(time_scale=1000.0)))
