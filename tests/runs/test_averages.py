"""The average of the weights of a run: how much of it the initial weights are, and who is told."""

import pytest
from conftest import sample, tiny_task, tiny_trainer

from uvit_decay.callbacks import EMA
from uvit_decay.data import Digits
from uvit_decay.runs.averages import initial_share


@pytest.mark.parametrize(
    ("updates", "arguments", "share"),
    [(60, (0.9999, False), 0.994), (2, (0.9999,), 0.1 * 2 / 11), (60, (0.9,), 0.0), (0, (0.9,), 1.0)],
)
def test_the_share_of_the_initial_weights_is_the_product_of_the_decays(updates, arguments, share):
    assert initial_share(updates, *arguments) == pytest.approx(share, abs=1e-3)


@pytest.mark.parametrize("ramp", [False, True])
def test_samples_of_an_average_of_initial_weights_are_remarked_on(ramp, tmp_path, monkeypatch, capsys):
    task = tiny_task()
    task.settings = {"trainer.callbacks.EMA.decay": 0.9999, "trainer.callbacks.EMA.ramp": ramp}
    tiny_trainer(tmp_path, EMA(ramp=ramp), max_steps=3).fit(task, Digits(32))
    command = ["--ckpt=checkpoints/last.ckpt", "--num=1", "--steps=1"]
    sample(monkeypatch, tmp_path, *command)
    assert ("--weights raw" in capsys.readouterr().err) is not ramp
    sample(monkeypatch, tmp_path, *command, "--weights=raw")
    assert "--weights raw" not in capsys.readouterr().err
