"""The checkpoint of the best value of a metric."""

import pytest
import torch
from conftest import same
from refusals import raises_user_error
from runs import StopAt, fit

from uvit_decay.callbacks import BestCheckpoint, LastCheckpoint
from uvit_decay.callbacks.periodic import Periodic, record
from uvit_decay.data import Digits
from uvit_decay.runs import history
from uvit_decay.runs.history import GENERATION

VALUES = {2: 5.0, 4: 3.0, 6: float("nan"), 8: 4.0, 10: 2.0, 5: 1.0}  # by step
VALIDATED = {"val_check_interval": 3, "check_val_every_n_epoch": None, "limit_val_batches": 1}


class Measured(Periodic):
    """A metric whose values are known before."""

    history_file = GENERATION

    def evaluate(self, trainer, task) -> None:
        if trainer.is_global_zero:
            value = VALUES[trainer.global_step]
            record(trainer, self.folder / GENERATION, {"fd": value, "tracked_spectrum_entropy": value}, {}, {})

    def evaluations(self, trainer, task) -> int:
        return 0


def step(path):
    return torch.load(path, weights_only=True)["global_step"]


def test_the_best_of_a_metric_is_kept_though_it_is_measured_after_the_checkpoint_of_its_step(tmp_path):
    best, folder = BestCheckpoint("fd"), tmp_path / "checkpoints"
    fit(tmp_path, Measured(2), best, LastCheckpoint(every_n_steps=4), StopAt(8), max_steps=10)
    assert (best.value, best.step) == (3.0, 4)
    assert step(folder / "best_fd.ckpt") == 4
    assert step(folder / "last.ckpt") == 8
    assert {path.name for path in folder.iterdir()} == {"best_fd.ckpt", "last.ckpt", "previous.ckpt"}
    best, former = BestCheckpoint("fd"), BestCheckpoint("tracked_effective_rank")  # an earlier name of the entropy
    _, whole, _ = fit(tmp_path / "whole", Measured(2), LastCheckpoint(100), max_steps=10)
    _, rest, _ = fit(tmp_path / "rest", Measured(2), best, former, max_steps=10, ckpt_path=folder / "best_fd.ckpt")
    assert same(rest, whole)
    assert (best.value, best.step) == (former.value, former.step) == (2.0, 10)
    assert step(tmp_path / "rest" / "checkpoints" / "best_fd.ckpt") == 10


def test_a_second_network_has_a_best_of_its_own(tmp_path):
    best = BestCheckpoint("val/loss", "max")
    for name in ("first", "second"):
        fit(tmp_path / name, best, max_steps=3, **VALIDATED)
        assert step(tmp_path / name / "checkpoints" / "best_val_loss.ckpt") == best.step == 3
        best.value = 1e3  # as if it had been the best by far


def test_a_run_goes_on_from_the_best_of_validation_and_knows_its_value(tmp_path):
    options = {"max_steps": 8, **VALIDATED}
    first, second = BestCheckpoint("val/loss", "max"), BestCheckpoint("val/loss", "max")
    _, whole, _ = fit(tmp_path / "whole", **options)
    fit(tmp_path / "half", first, StopAt(3), **options)
    best = tmp_path / "half" / "checkpoints" / "best_val_loss.ckpt"
    assert first.step == step(best) == 3
    _, rest, _ = fit(tmp_path / "rest", second, ckpt_path=best, **options)
    assert same(rest, whole)
    assert second.value >= first.value


def test_the_value_of_the_step_from_which_a_run_resumes_is_known(tmp_path):
    """Its checkpoint was saved before the validation of that step, which is not repeated."""
    options = {**VALIDATED, "val_check_interval": 2}
    first, second = BestCheckpoint("val/loss", "max"), BestCheckpoint("val/loss", "max")
    fit(tmp_path, first, LastCheckpoint(every_n_steps=2), max_steps=2, **options)
    checkpoints = tmp_path / "checkpoints"
    stored = torch.load(checkpoints / "last.ckpt", weights_only=True)["callbacks"][first.state_key]
    assert stored["step"] < first.step == 2
    first.value = 1e3  # as if it had been the best by far
    best = torch.load(checkpoints / "best_val_loss.ckpt", weights_only=True)
    best["callbacks"][first.state_key]["value"] = first.value
    torch.save(best, checkpoints / "best_val_loss.ckpt")
    fit(tmp_path, second, LastCheckpoint(every_n_steps=2), max_steps=4, ckpt_path=checkpoints / "last.ckpt", **options)
    assert (second.value, second.step) == (1e3, 2)
    assert step(checkpoints / "best_val_loss.ckpt") == 2


def test_what_nothing_measures_is_refused(tmp_path):
    with raises_user_error("GenerationMetrics", "LinearProbes"):
        fit(tmp_path, BestCheckpoint("fd"), max_steps=3)
    with raises_user_error("val/loss", "validation"):
        fit(tmp_path, BestCheckpoint("val/loss"), max_steps=3)
    with raises_user_error("val/los", "val/loss"):
        fit(tmp_path, BestCheckpoint("val/los"), max_steps=3, **VALIDATED)
    with raises_user_error("BestCheckpoint"):
        BestCheckpoint("a b")


def test_an_evaluation_counts_once_whatever_the_micro_batches(tmp_path, caplog):
    fit(tmp_path, Measured(2), BestCheckpoint("nonsense"), max_steps=5, data=Digits(32, device_batch_size=8))
    lines = [line for line in caplog.messages if line.startswith("BestCheckpoint") and "nonsense" in line]
    assert len(lines) == 3  # at steps 2 and 4, and at the end


def test_an_evaluation_in_which_a_run_was_stopped_is_made_up_for(tmp_path):
    class Killed(Measured):
        def evaluate(self, trainer, task) -> None:
            if trainer.global_step == 4:
                raise KeyError("as if killed")
            super().evaluate(trainer, task)

    with pytest.raises(KeyError):
        fit(tmp_path / "half", Killed(2), LastCheckpoint(every_n_steps=4), max_steps=5)
    fit(tmp_path / "rest", Measured(2), max_steps=5, ckpt_path=tmp_path / "half" / "checkpoints" / "last.ckpt")
    measured = history.read(tmp_path / "rest" / GENERATION)
    assert [(m.step, m.values["fd"]) for m in measured] == [(step, VALUES[step]) for step in (2, 4, 5)]


def test_epochs_count_images_of_all_batch_sizes(tmp_path):
    fit(tmp_path / "half", Measured(2), LastCheckpoint(every_n_steps=2), max_steps=2)
    path = tmp_path / "half" / "checkpoints" / "last.ckpt"
    fit(tmp_path / "rest", Measured(2), max_steps=4, data=Digits(16), ckpt_path=path)
    first, last = (history.read(tmp_path / name / GENERATION)[-1] for name in ("half", "rest"))
    assert (first.epoch, first.images_seen) == (2 / 44, 64)
    assert (last.epoch, last.images_seen) == ((64 + 32) / (16 * 89), 96)
