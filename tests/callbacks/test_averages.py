"""Averages of several decays at once: each is what it would be alone, on resumption under other decays too."""

import pytest
import torch
from conftest import same, state, tiny_task, tiny_trainer
from lightning.pytorch import Callback
from record_ops import RecordOps

from uvit_decay.callbacks import EMA
from uvit_decay.data import Digits
from uvit_decay.runtime.errors import UserError
from uvit_decay.tasks.settings import decides

HALF, ALL = 4, 8


class AtStart(Callback):
    """The averages and the weights with which training begins."""

    def on_train_start(self, trainer, task) -> None:
        self.weights = state(task.net)
        (ema,) = (callback for callback in trainer.callbacks if isinstance(callback, EMA))
        self.averages = {one.decay: {k: v.clone() for k, v in one.shadow.items()} for one in ema.averages}
        self.updates = {one.decay: one.updates for one in ema.averages}


def run(folder, *decays, max_steps=ALL, ckpt=None, callbacks=(), **options):
    """The averages by decay after a run."""
    ema = EMA(decays[0], extra_decays=decays[1:], **options)
    trainer = tiny_trainer(folder, ema, *callbacks, max_steps=max_steps)
    trainer.fit(tiny_task(), Digits(32), ckpt_path=ckpt)
    return {average.decay: average.shadow for average in ema.averages}


def stored(folder):
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["callbacks"]["EMA"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The average of each decay in runs that keep it alone, and the folder of these runs."""
    folder = tmp_path_factory.mktemp("alone")
    return {decay: run(folder / str(decay), decay)[decay] for decay in (0.9, 0.3, 0.2)}, folder


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A checkpoint of half a run with the decays .9 and .3."""
    folder = tmp_path_factory.mktemp("half")
    run(folder, 0.9, 0.3, max_steps=HALF)
    return folder / "checkpoints" / "last.ckpt"


def test_each_average_is_what_it_is_alone_and_the_first_stays_the_default(alone, tmp_path):
    together = run(tmp_path, 0.9, 0.3, 0.2)
    for decay, average in alone[0].items():
        assert same(together[decay], average), decay
    assert all(value.dtype == torch.float32 for value in together[0.3].values())
    one, several = stored(alone[1] / "0.9"), stored(tmp_path)
    assert list(one) == ["shadow", "updates"]
    assert same(several["shadow"], one["shadow"])
    assert list(several) == ["shadow", "updates", "decay", "extra"]
    assert (several["decay"], list(several["extra"])) == (0.9, ["0.3", "0.2"])


def test_a_resumed_run_has_all_averages_of_the_whole_run(alone, half, tmp_path):
    for decay, average in run(tmp_path, 0.9, 0.3, ckpt=half).items():
        assert same(average, alone[0][decay])


def test_the_order_of_decays_may_change(alone, half, tmp_path):
    for decay, average in run(tmp_path, 0.3, 0.9, ckpt=half).items():
        assert same(average, alone[0][decay])


def test_a_new_decay_starts_from_the_weights_of_the_checkpoint_and_the_run_says_so(alone, half, tmp_path, caplog):
    start = AtStart()
    with caplog.at_level("INFO"):
        after = run(tmp_path, 0.9, 0.2, 0.3, ckpt=half, callbacks=[start])
    assert [text for text in caplog.messages if "is new" in text] == [
        "the EMA of decay 0.2 is new: it starts from the checkpoint's weights"
    ]
    assert same(start.averages[0.2], {name: start.weights[name] for name in start.averages[0.2]})
    assert start.updates == {0.9: HALF, 0.3: HALF, 0.2: 0}
    assert same(after[0.9], alone[0][0.9])
    assert same(after[0.3], alone[0][0.3])


def test_decays_are_added_to_a_file_of_one_average_and_dropped_again(alone, tmp_path):
    run(tmp_path / "one", 0.9, max_steps=HALF)
    first = tmp_path / "one" / "checkpoints" / "last.ckpt"
    assert same(run(tmp_path / "two", 0.9, 0.3, max_steps=HALF + 1, ckpt=first)[0.9], {}) is False
    second = tmp_path / "two" / "checkpoints" / "last.ckpt"
    assert same(run(tmp_path / "three", 0.9, ckpt=second)[0.9], alone[0][0.9])
    assert list(stored(tmp_path / "three")) == ["shadow", "updates"]


def test_the_first_average_goes_on_under_a_new_decay_and_shares_nothing(alone, half, tmp_path):
    start = AtStart()
    after = run(tmp_path, 0.15, 0.9, ckpt=half, callbacks=[start])
    assert same(start.averages[0.15], start.averages[0.9])
    assert same(after[0.9], alone[0][0.9])
    assert not same(after[0.15], after[0.9])


def test_an_average_costs_one_operation_more():
    task = tiny_task()
    counts = []
    for decays in ((), (0.3,), (0.3, 0.2)):
        ema = EMA(0.9, extra_decays=decays)
        trainer = type("At", (), {"global_step": 1})()
        ema.on_fit_start(trainer, task)
        ema._trained = list(task.net.parameters())
        with RecordOps() as recorder:
            ema.on_train_batch_end(trainer, task)
        counts.append(sum(name.startswith("aten._foreach_lerp_") for name in recorder.ops))
        others = [name for name in recorder.ops if not name.startswith(("aten._foreach_lerp_", "aten.detach"))]
        assert not others
    assert counts == [1, 2, 3]


def test_only_further_averages_may_differ_between_a_run_and_one_that_goes_on():
    names = ("decay", "ramp", "extra_decays", "class_path")
    assert [decides(f"trainer.callbacks.EMA.{name}") for name in names] == [True, True, False, True]


@pytest.mark.parametrize("decays", [(0.9, 0.9), (0.9, 0.3, 0.3)])
def test_a_decay_that_is_given_twice_is_refused(decays):
    with pytest.raises(UserError, match=r"EMA decays must differ, got 0.9, "):
        EMA(decays[0], extra_decays=decays[1:])


def test_a_further_decay_outside_its_range_is_refused():
    with pytest.raises(UserError, match=r"\[0, 1\), got 1.0"):
        EMA(0.9, extra_decays=[1.0])


def test_a_further_average_that_is_not_finite_is_never_saved(tmp_path):
    ema = EMA(0.9, extra_decays=[0.3])
    trainer = tiny_trainer(tmp_path, ema, max_steps=3)
    trainer.fit(tiny_task(), Digits(32))
    ema.averages[1].shadow["norm.weight"][0] = float("nan")
    with pytest.raises(UserError, match="averaged weights are not finite at step 3"):
        trainer.save_checkpoint(tmp_path / "bad.ckpt")
