"""The moving average: right after resumption, in validation, after exceptions, in short runs."""

import pytest
import torch
from conftest import same, state, tiny_task, tiny_trainer
from lightning.pytorch.callbacks import LambdaCallback
from record_ops import RecordOps
from refusals import raises_user_error
from small_vit import linear_probe, small_vit

from uvit_decay.callbacks import EMA
from uvit_decay.callbacks.ema import evaluation_weights, ramped_decay
from uvit_decay.data import Digits
from uvit_decay.tasks import ClassifyTask


def parameters(task):
    return {name: p.detach().clone() for name, p in task.net.named_parameters()}


def remembering(history):
    """Return a callback that appends the weights at the start and after every step."""

    def remember(trainer, task, *_):
        history.append(parameters(task))

    return LambdaCallback(on_train_start=remember, on_train_batch_end=remember)


@pytest.mark.parametrize(("decay", "ramp", "steps"), [(0.9, True, None), (0.9, False, None), (0.9, True, 12)])
def test_the_average_is_its_definition(tmp_path, decay, ramp, steps):
    ema, history = EMA(decay, ramp, steps), []
    tiny_trainer(tmp_path, ema, remembering(history), max_steps=15).fit(tiny_task(), Digits(32))
    expected = {name: p.double() for name, p in history[0].items()}
    for n, now in enumerate(history[1:]):
        start = 10 if steps is None else 13 / decay - 12  # (1 + n) / (start + n) is `decay` at n = 12
        rate = min(decay, (1 + n) / (start + n)) if ramp else decay
        expected = {name: rate * expected[name] + (1 - rate) * p.double() for name, p in now.items()}
    assert ema.updates == 15
    for name, value in expected.items():
        torch.testing.assert_close(ema.shadow[name].double(), value, rtol=1e-4, atol=1e-6)


def test_a_second_network_has_an_average_of_its_own_and_the_first_goes_on_with_its(tmp_path):
    ema, alone, first, second = EMA(0.9), EMA(0.9), tiny_task(), tiny_task()
    for task, updates in ((first, 4), (first, 8), (second, 4)):
        tiny_trainer(tmp_path, ema, max_steps=4).fit(task, Digits(32))
        assert ema.updates == updates
    tiny_trainer(tmp_path / "alone", alone, max_steps=4).fit(tiny_task(), Digits(32))
    assert same(ema.shadow, alone.shadow)


@pytest.mark.parametrize("first", [True, False])
def test_validation_sees_the_average_whatever_the_order_of_callbacks(tmp_path, first):
    seen, ema, task = [], EMA(0.9), tiny_task()

    def look(trainer, task):
        with evaluation_weights(trainer, task):
            seen.append(parameters(task))

    def look_twice(trainer, task, *_):
        seen.append(parameters(task))
        look(trainer, task)

    watch = LambdaCallback(on_validation_batch_end=look_twice, on_validation_epoch_end=look)
    options = {"limit_val_batches": 1, "val_check_interval": 8, "check_val_every_n_epoch": None}
    tiny_trainer(tmp_path, *((watch, ema) if first else (ema, watch)), max_steps=8, **options).fit(task, Digits(32))
    assert len(seen) == 3
    assert all(same(actual, ema.shadow) for actual in seen)
    assert not same(parameters(task), ema.shadow)


def test_after_an_exception_in_validation_the_raw_weights_are_back(tmp_path):
    def fail(trainer, *_):
        trainer.save_checkpoint(tmp_path / "during.ckpt", weights_only=False)
        raise RuntimeError("broken")

    ema, history, task = EMA(0.9), [], tiny_task()
    callbacks = ema, remembering(history), LambdaCallback(on_validation_batch_end=fail)
    options = {"limit_val_batches": 1, "val_check_interval": 6, "check_val_every_n_epoch": None}
    with pytest.raises(RuntimeError, match="broken"):
        tiny_trainer(tmp_path, *callbacks, max_steps=8, **options).fit(task, Digits(32))
    assert same(parameters(task), history[-1])
    saved = torch.load(tmp_path / "during.ckpt", weights_only=True)
    raw = {name.removeprefix("net."): value for name, value in saved["state_dict"].items()}
    assert all(torch.equal(raw[name], value) for name, value in history[-1].items())
    assert same(saved["callbacks"]["EMA"]["shadow"], ema.shadow)


def test_averaged_restores_weights_and_mode_after_an_error_and_a_bad_average_is_never_saved(tmp_path):
    ema, task = EMA(0.9), tiny_task()
    trainer = tiny_trainer(tmp_path, ema, max_steps=3)
    trainer.fit(task, Digits(32, device_batch_size=16))
    assert ema.updates == 3  # accumulated gradients count as one
    assert "alphas" not in ema.shadow
    assert all(value.dtype == torch.float32 for value in ema.shadow.values())
    before = state(task)
    task.net.train()
    with evaluation_weights(trainer, task) as kind:
        assert kind == "ema"
        assert not task.net.training
        assert same(parameters(task), ema.shadow)

    def fail():
        with evaluation_weights(trainer, task):
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert same(state(task), before)
    assert task.net.training
    ema.shadow["norm.weight"][0] = float("nan")
    with raises_user_error("averaged", "step 3"):
        trainer.save_checkpoint(tmp_path / "bad.ckpt")
    assert not (tmp_path / "bad.ckpt").exists()
    trainer.callbacks.remove(ema)
    with evaluation_weights(trainer, task) as kind:
        assert kind == "raw"


def test_weights_below_batch_norms_are_not_averaged_but_those_of_a_probe_are(tmp_path):
    trained = ClassifyTask(small_vit(batch_norm=True))
    with raises_user_error("batch norms"):
        tiny_trainer(tmp_path, EMA(0.9), max_steps=1).fit(trained, Digits(32))
    ema = EMA(0.9)
    tiny_trainer(tmp_path, ema, max_steps=1).fit(linear_probe(), Digits(32))
    assert ema.updates == 1


def test_an_update_is_one_operation():
    ema, task = EMA(0.9), tiny_task()
    trainer = type("At", (), {"global_step": 1})()
    ema.on_fit_start(trainer, task)
    ema._trained = list(task.net.parameters())
    with RecordOps() as recorder:
        ema.on_train_batch_end(trainer, task)
    assert [name for name in recorder.ops if not name.startswith("aten.detach")] == ["aten._foreach_lerp_.Scalar"]


@pytest.mark.parametrize(
    ("decay", "steps", "end"),
    [(0.9999, None, 89_990), (0.999, None, 8_990), (0.999, 2_000, 2_000), (0.995, 1, 1), (0.0, 5, 0)],
)
def test_the_ramp_ends_after_its_steps(decay, steps, end):
    assert ramped_decay(decay, end, steps) == pytest.approx(decay, rel=1e-12)
    assert ramped_decay(decay, end + 1_000_000, steps) == decay
    if end:
        assert ramped_decay(decay, end - 1, steps) < decay * (1 - 1e-9)
