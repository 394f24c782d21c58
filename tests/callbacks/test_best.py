"""The checkpoint of the best value of a metric."""

from functools import partial

import pytest
import torch
from conftest import same
from gloo import on_two_processes
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from refusals import raises_user_error
from runs import StopAt, fit

from uvit_decay.callbacks import BestCheckpoint, LastCheckpoint
from uvit_decay.callbacks.periodic import Periodic, record
from uvit_decay.data import Digits
from uvit_decay.runs import history
from uvit_decay.runs.history import GENERATION, PROBES

VALUES = {2: 5.0, 4: 3.0, 6: float("nan"), 8: 4.0, 10: 2.0, 5: 1.0}  # by step
VALIDATED = {"val_check_interval": 3, "check_val_every_n_epoch": None, "limit_val_batches": 1}


class Measured(Periodic):
    """A metric whose values are known before."""

    history_file = GENERATION

    def evaluate(self, trainer, task) -> dict | None:
        if not trainer.is_global_zero:
            return None
        value = VALUES[trainer.global_step]
        values = {"fd": value, "tracked_spectrum_entropy": value}
        record(trainer, self.folder / GENERATION, values, {}, {})
        return values

    def evaluations(self, trainer, task) -> int:
        return 0


def step(path):
    return torch.load(path, weights_only=True)["global_step"]


def test_the_best_of_a_metric_is_kept_though_it_is_measured_after_the_checkpoint_of_its_step(tmp_path):
    folder = tmp_path / "checkpoints"
    fit(tmp_path, Measured(2), BestCheckpoint("fd"), LastCheckpoint(every_n_steps=4), StopAt(8), max_steps=10)
    assert step(folder / "best_fd.ckpt") == 4
    assert step(folder / "last.ckpt") == 8
    assert {path.name for path in folder.iterdir()} == {"best_fd.ckpt", "last.ckpt", "previous.ckpt"}
    best, probed = BestCheckpoint("fd"), BestCheckpoint("tracked_spectrum_entropy")
    _, whole, _ = fit(tmp_path / "whole", Measured(2), LastCheckpoint(100), max_steps=10)
    (tmp_path / "rest").mkdir()
    folder.rename(tmp_path / "rest" / "checkpoints")
    folder = tmp_path / "rest" / "checkpoints"
    _, rest, _ = fit(tmp_path / "rest", Measured(2), best, probed, max_steps=10, ckpt_path=folder / "best_fd.ckpt")
    assert same(rest, whole)
    assert float(best.best_model_score) == float(probed.best_model_score) == 2.0
    assert step(folder / "best_fd.ckpt") == step(folder / "best_tracked_spectrum_entropy.ckpt") == 10


def test_a_run_in_a_moved_folder_keeps_its_best_and_another_folder_begins_again(tmp_path):
    fit(tmp_path / "first", Measured(2), BestCheckpoint("fd"), LastCheckpoint(every_n_steps=4), max_steps=4)
    run = (tmp_path / "first").rename(tmp_path / "moved")
    last = run / "checkpoints" / "last.ckpt"
    same_run, other_run = BestCheckpoint("fd"), BestCheckpoint("fd")
    fit(tmp_path / "other", Measured(0, at_end=False), other_run, max_steps=5, ckpt_path=last)
    fit(run, Measured(2), same_run, LastCheckpoint(100), max_steps=8, ckpt_path=last)
    assert other_run.best_model_score is None
    assert same_run.best_model_path == str(run / "checkpoints" / "best_fd.ckpt")
    assert (float(same_run.best_model_score), step(same_run.best_model_path)) == (3.0, 4)


def test_a_metric_that_is_measured_only_at_the_end_is_compared_although_another_one_is_due_there(tmp_path):
    class Probed(Periodic):
        history_file = PROBES

        def evaluate(self, trainer, task) -> dict:
            return {"best_accuracy": 0.5}

        def evaluations(self, trainer, task) -> int:
            return 0

    best = BestCheckpoint("fd")
    fit(tmp_path, Probed(2), Measured(), best, max_steps=4)
    assert (float(best.best_model_score), step(best.best_model_path)) == (3.0, 4)


def test_a_second_network_begins_its_own_comparisons(tmp_path):
    best = BestCheckpoint("fd")
    fit(tmp_path / "first", Measured(2), best, max_steps=4)
    fit(tmp_path / "second", Measured(2, at_end=False), best, max_steps=3)
    assert best.best_model_path == str(tmp_path / "second" / "checkpoints" / "best_fd.ckpt")
    assert (float(best.best_model_score), step(best.best_model_path)) == (5.0, 2)


@pytest.mark.parametrize("name", ["val/loss", "fd"])
def test_the_value_of_the_step_from_which_a_run_resumes_is_known(tmp_path, name):
    """Its checkpoint was saved before the evaluations of that step, which are not repeated."""
    options = {**VALIDATED, "val_check_interval": 2}
    first, second = BestCheckpoint(name, "max"), BestCheckpoint(name, "max")
    fit(tmp_path, first, Measured(2), LastCheckpoint(every_n_steps=2), max_steps=2, **options)
    last, best = (tmp_path / "checkpoints" / f"{stem}.ckpt" for stem in ("last", f"best_{name.replace('/', '_')}"))
    assert not torch.load(last, weights_only=True)["callbacks"][first.state_key]["best_model_path"]
    stored = torch.load(best, weights_only=True)
    state = stored["callbacks"][first.state_key]
    state["best_model_score"] = torch.tensor(1e3)  # as if it had been the best by far
    state["best_k_models"] = {path: torch.tensor(1e3) for path in state["best_k_models"]}
    torch.save(stored, best)
    fit(tmp_path, second, Measured(2), LastCheckpoint(every_n_steps=2), max_steps=4, ckpt_path=last, **options)
    assert float(second.best_model_score) == 1e3
    assert step(best) == 2


def test_what_nothing_measures_is_refused(tmp_path):
    with raises_user_error("GenerationMetrics", "LinearProbes"):
        fit(tmp_path, BestCheckpoint("fd"), max_steps=3)
    with raises_user_error("val/loss", "validation"):
        fit(tmp_path, BestCheckpoint("val/loss"), max_steps=3)
    with pytest.raises(MisconfigurationException, match=r"val/los'.*val/loss"):
        fit(tmp_path, BestCheckpoint("val/los"), max_steps=3, **VALIDATED)


def rank_of_two(folder, rank):
    """Return the best value and its file on a rank; only rank 0 measures."""
    best = BestCheckpoint("fd")
    fit(folder, Measured(2), best, max_steps=10, devices=2, strategy="ddp")
    return [float(best.best_model_score), best.best_model_path]


@pytest.mark.slow
def test_two_processes_keep_the_same_best(programs, tmp_path):
    first, second = on_two_processes(programs, partial(rank_of_two, tmp_path), tmp_path)
    assert first == second == [2.0, str(tmp_path / "checkpoints" / "best_fd.ckpt")]
    assert step(first[1]) == 10


def test_an_evaluation_in_which_a_run_was_stopped_is_made_up_for(tmp_path):
    class Killed(Measured):
        def evaluate(self, trainer, task) -> dict | None:
            if trainer.global_step == 4:
                raise KeyError("as if killed")
            return super().evaluate(trainer, task)

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
