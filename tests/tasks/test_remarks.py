"""What a task says and logs about a run that is short, or whose validation loss grows."""

import csv

import pytest
from conftest import tiny_task, tiny_trainer
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from uvit_decay.data import Digits
from uvit_decay.tasks.finite import ValidationLoss


@pytest.mark.parametrize(("every", "steps"), [(50, [3]), (2, [2]), (0, [])])
def test_a_run_shorter_than_the_interval_of_the_log_logs_its_last_step(every, steps, tmp_path):
    logger = CSVLogger(tmp_path)
    tiny_trainer(tmp_path, max_steps=3, logger=logger, log_every_n_steps=every).fit(tiny_task(), Digits(32))
    logged = []
    for path in tmp_path.rglob("metrics.csv"):
        with path.open() as file:
            logged += [int(row["step"]) + 1 for row in csv.DictReader(file) if row["train/loss"]]
    assert logged == steps


def test_a_validation_loss_that_grows_tenfold_is_remarked_on_once(caplog):
    task = tiny_task()
    task.trainer = Trainer(logger=False, accelerator="cpu")
    watched = ValidationLoss()
    said = []
    for loss in (0.5, 0.2, 1.9, 2.1, 9.0):
        task.trainer.callback_metrics["val/loss"] = loss
        caplog.clear()
        watched.remark(task)
        said.append(any("val/loss" in line and "--model.optim.lr" in line for line in caplog.messages))
    assert said == [False, False, False, True, False]
