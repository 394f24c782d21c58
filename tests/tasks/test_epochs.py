"""Runs limited by epochs that stop and are resumed."""

import pytest
from conftest import Losses, same, state, tiny_task, tiny_trainer
from lightning.pytorch.callbacks import LambdaCallback

from uvit_decay.data import Digits

EPOCH = 5  # steps of 256 of 1437 digits


def run(folder, ckpt_path=None, max_steps=-1, device_batch_size=None, **options):
    task, losses, ends = tiny_task(), Losses(), []
    epochs = LambdaCallback(on_train_epoch_end=lambda trainer, _: ends.append(trainer.global_step))
    trainer = tiny_trainer(folder, losses, epochs, max_steps=max_steps, max_epochs=3, **options)
    trainer.fit(task, Digits(256, device_batch_size), ckpt_path=ckpt_path)
    return losses.values, state(task), trainer.global_step, ends, folder / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("stops", [(EPOCH,), (3, 7)], ids=str)
def test_a_run_that_stopped_before_its_last_epoch_goes_on_at_its_place(stops, whole, tmp_path):
    losses, checkpoint = [], None
    for stop in (*stops, -1):
        values, weights, step, ends, checkpoint = run(tmp_path / str(stop), checkpoint, stop)
        losses += values
    assert losses == whole[0]
    assert step == 3 * EPOCH
    assert same(weights, whole[1])
    assert ends == [end for end in whole[3] if end > stops[-1]]


@pytest.mark.parametrize(("limit", "interval", "piece"), [(5, 2, None), (5 / 44 + 1e-6, 0.4, 16), (1, 1, 16)])
def test_limits_and_intervals_count_steps_in_any_pieces(tmp_path, limit, interval, piece):
    validated, task = [], tiny_task()
    validations = LambdaCallback(on_validation_start=lambda trainer, _: validated.append(trainer.global_step))
    options = {"limit_train_batches": limit, "val_check_interval": interval, "limit_val_batches": 1}
    trainer = tiny_trainer(tmp_path, validations, max_steps=-1, max_epochs=2, **options)
    trainer.fit(task, Digits(32, piece))
    assert (trainer.global_step, validated) == ((2, [1, 2]) if limit == 1 else (10, [2, 4, 7, 9]))
    left = trainer.limit_train_batches, trainer.val_check_interval, trainer.accumulate_grad_batches
    assert left == (limit, interval, 1)


def test_every_epoch_of_a_limit_has_its_steps(tmp_path):
    *_, step, ends, _ = run(tmp_path, limit_train_batches=3)
    assert (step, ends) == (9, [3, 6, 9])  # the second crosses the end of the 5 batches of all images


def test_images_seen_are_counted_over_changes_of_the_batch(tmp_path):
    path, task = tmp_path / "checkpoints" / "last.ckpt", tiny_task()
    tiny_trainer(tmp_path, max_steps=2).fit(tiny_task(), Digits(32))
    tiny_trainer(tmp_path, max_steps=5).fit(task, Digits(16), ckpt_path=path)
    assert task.images_seen == 2 * 32 + 3 * 16


def test_without_training_batches_nothing_is_trained(tmp_path):
    stopped = run(tmp_path / "stopped", max_steps=2)[-1]
    assert run(tmp_path / "rest", stopped, limit_train_batches=0)[0] == []
