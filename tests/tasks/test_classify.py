"""Classifiers: exact accuracy, exact resumption, what is frozen, what is random, and what is refused."""

import pytest
import torch
from conftest import same, state, tiny_net, tiny_trainer, train
from lightning.pytorch.callbacks import LambdaCallback
from refusals import find_line, raises_user_error
from runs import configuration, fit
from small_vit import batch, fine_tuning, linear_probe, small_vit

from uvit_decay.callbacks import LastCheckpoint
from uvit_decay.checkpoint import load
from uvit_decay.data import Digits
from uvit_decay.nn import ResNet
from uvit_decay.pictures import to_float
from uvit_decay.tasks import ClassifyTask

VALIDATION = {"limit_val_batches": 1.0, "val_check_interval": 4, "check_val_every_n_epoch": None}


def small_resnet():
    torch.manual_seed(0)
    return ResNet(8, 1, width=8, num_classes=10, stem="cifar", alpha_min=0.7, pixels="unit")


@pytest.mark.parametrize("make", [fine_tuning, linear_probe, lambda: ClassifyTask(small_resnet())])
def test_accuracy_is_that_of_every_test_image_counted_once(tmp_path, make):
    task, data = make(), Digits(32)
    trainer = tiny_trainer(tmp_path, max_steps=4, **VALIDATION)
    trainer.fit(task, data)
    images, labels = data.test[list(range(len(data.test)))]
    assert len(labels) % 32  # the last batch is not whole
    with torch.no_grad():
        logits = task.net.eval()(to_float(images)).double().log_softmax(dim=1)
    order = logits.argsort(dim=1, descending=True)
    expected = {
        "val/loss": -logits[torch.arange(len(labels)), labels].mean(),
        "val/top1": (order[:, 0] == labels).double().mean(),
        "val/top5": (order[:, :5] == labels[:, None]).any(dim=1).double().mean(),
    }
    for name, value in expected.items():
        assert float(trainer.callback_metrics[name]) == pytest.approx(float(value), rel=1e-5)


def test_a_resumed_resnet_has_the_running_statistics_of_the_run_that_was_not_stopped(tmp_path):
    def part(name, *callbacks, **options):
        task = ClassifyTask(small_resnet())
        tiny_trainer(tmp_path / name, *callbacks, max_steps=6).fit(task, Digits(32), **options)
        return state(task)

    whole = part("whole", LastCheckpoint(keep_every_n_steps=3))
    rest = part("rest", ckpt_path=tmp_path / "whole" / "checkpoints" / "step_00000003.ckpt")
    assert same(rest, whole)
    assert whole["net.bn1.num_batches_tracked"] == 6


def test_whatever_is_frozen_stays_as_it_was(tmp_path):
    nets = {"vit": small_vit(batch_norm=True, norm=True), "resnet": small_resnet()}
    for name, net in nets.items():
        task = linear_probe(net)
        before = state(task)
        fit(tmp_path / name, max_steps=6, task=task, **{**VALIDATION, "val_check_interval": 2})
        changed = {key for key, value in state(task).items() if not torch.equal(value, before[key])}
        head = {"net.fc.weight", "net.fc.bias"} if name == "resnet" else {"net.head.1.weight", "net.head.1.bias"}
        batch_norm = {f"net.head.0.{kind}" for kind in ("running_mean", "running_var", "num_batches_tracked")}
        assert changed == head | (batch_norm if name == "vit" else set())


@pytest.mark.parametrize("given", [{"frozen": True}, {"init_from": "unread.safetensors"}])
def test_a_task_of_a_checkpoint_has_its_classifier(tmp_path, given):
    task = linear_probe()
    fit(tmp_path, max_steps=2, task=task)
    loaded = ClassifyTask.load_from_checkpoint(tmp_path / "checkpoints" / "last.ckpt", "raw", **given)
    assert same(loaded.net.state_dict(), task.net.state_dict())
    assert not loaded.training


def test_the_loss_is_the_soft_cross_entropy_of_mixed_images():
    task = fine_tuning(drop_path=0.0)
    images, targets = task.mixing(batch())
    expected = -(targets.double() * task.net(images).double().log_softmax(dim=1)).sum(dim=1).mean()
    assert float(task.loss(batch(), "train")) == pytest.approx(float(expected), rel=1e-6)
    smooth = ClassifyTask(small_vit(), label_smoothing=0.2)
    logits, labels = smooth.net(batch().images).double().log_softmax(dim=1), batch().labels
    expected = -(0.8 * logits[torch.arange(8), labels] + 0.2 * logits.mean(dim=1)).mean()
    assert float(smooth.loss(batch(), "train")) == pytest.approx(float(expected), rel=1e-6)
    expected = -logits[torch.arange(8), labels].mean()
    assert float(smooth.loss(batch(), "val")) == pytest.approx(float(expected), rel=1e-6)


def test_branches_are_dropped_more_often_the_deeper_they_are_and_per_image():
    task = ClassifyTask(small_vit(depth=5), drop_path=0.4)
    kept = task.draw_factors(batch(4000, total=4000)._replace(images=torch.empty(4000, 1)))
    rates = [0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4]  # timm: linspace over blocks, both branches alike
    assert kept.shape == (10, 4000)
    assert (kept == 0).double().mean(dim=1).tolist() == pytest.approx(rates, abs=0.03)
    for row, rate in zip(kept, rates, strict=True):
        assert row[row > 0].tolist() == pytest.approx([1 / (1 - rate)] * int((row > 0).sum()))
    half = task.draw_factors(batch(2000, number=0, total=4000)._replace(images=torch.empty(2000, 1)))
    whole = task.draw_factors(batch(4000, number=0, total=4000)._replace(images=torch.empty(4000, 1)))
    assert torch.equal(half, whole[:, :2000])


def test_branches_are_dropped_in_training_only():
    task, part = ClassifyTask(small_vit(), drop_path=0.5), batch()
    kept, every = task.draw_factors(part), torch.ones(4, 8)
    assert (kept == 0).any()
    for stage, factors in (("train", kept), ("val", every)):
        expected = torch.nn.functional.cross_entropy(task.net(part.images, factors), part.labels)
        assert torch.equal(task.loss(part, stage), expected)


def test_a_checkpoint_is_of_a_classifier_and_knows_its_classes(tmp_path):
    fit(tmp_path, max_steps=2, task=fine_tuning())
    loaded = load(tmp_path / "checkpoints" / "last.ckpt")
    assert (loaded.card.class_names, loaded.path) == (tuple("0123456789"), None)
    with raises_user_error("ViT"):
        loaded.source(torch.device("cpu"))


def test_networks_without_classifiers_data_of_one_class_and_odd_pieces_are_refused(tmp_path):
    with raises_user_error("UViT", "`net`", "ViT", "ResNet"):
        ClassifyTask(tiny_net(num_classes=10))

    class One(Digits):
        def load(self) -> None:
            super().load()
            self.class_names = ("digit",)

    with raises_user_error("one", "classes", 1):
        fit(tmp_path, max_steps=1, task=linear_probe(), data=One(32))
    with raises_user_error("33 images"):
        fit(tmp_path, max_steps=1, task=fine_tuning(), data=Digits(33))


def test_pieces_of_a_batch_train_the_same_network(tmp_path):
    runs = [fit(tmp_path / str(size), max_steps=6, task=fine_tuning(), data=Digits(32, size))[1] for size in (None, 8)]
    for name, value in runs[0].items():
        if name.endswith("qkv.bias"):  # those of keys change nothing: AdamW turns the rounding of gradients to steps
            value, runs[1][name] = (bias.reshape(3, 16)[[0, 2]] for bias in (value, runs[1][name]))
        torch.testing.assert_close(runs[1][name], value, rtol=0, atol=2e-5)


def test_a_frozen_encoder_stays_frozen_after_a_callback_that_evaluates(tmp_path):
    evaluate = LambdaCallback(on_train_batch_end=lambda trainer, task, *_: (task.net.eval(), task.net.train()))
    a = fit(tmp_path / "a", max_steps=4, task=linear_probe())
    b = fit(tmp_path / "b", evaluate, max_steps=4, task=linear_probe())
    assert same(a[1], b[1])


def test_a_configuration_trains_and_is_validated_from_the_command_line(tmp_path, monkeypatch, caplog, capsys):
    lars = {"optimizer": "lars", "blr": 0.1, "weight_decay": 0.0, "warmup_epochs": 1, "schedule": "cosine"}
    config = f"--config={configuration(tmp_path, 'probe', linear_probe(), frozen=True, optim=lars)}"
    train(monkeypatch, tmp_path, "fit", config, "--trainer.max_epochs=2", "--trainer.precision=bf16-mixed")
    find_line(caplog.text, "360 test", "step 8")
    find_line(caplog.text, "frozen", "--model.init_from")
    path = tmp_path / "runs" / "probe" / "version_0" / "checkpoints" / "last.ckpt"
    train(monkeypatch, tmp_path, "validate", config, f"--ckpt_path={path}")
    assert "val/top5" in capsys.readouterr().out


class MoreLogits(ResNet):
    """A classifier with logits of one class more than it names."""

    def forward(self, x):
        return torch.nn.functional.pad(super().forward(x), (0, 1))


def test_logits_of_another_shape_neither_train_nor_validate(tmp_path):
    task = ClassifyTask(small_resnet())
    task.net.__class__ = MoreLogits
    with raises_user_error("logits", (32, 10), (32, 11)):
        tiny_trainer(tmp_path, max_steps=1).fit(task, Digits(32))
    with raises_user_error("logits", 10, 11):
        tiny_trainer(tmp_path, limit_val_batches=1).validate(task, Digits(32))
