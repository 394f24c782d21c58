"""First runs on own pictures: metrics and probes of the default configuration are sized to the data and the run."""

from types import SimpleNamespace

import pytest
import yaml
from conftest import train
from image_noise import tree
from refusals import find_line

from uvit_decay.callbacks import GenerationMetrics, LinearProbes
from uvit_decay.data import Digits
from uvit_decay.metrics import SmallClassifier
from uvit_decay.runs import history

NET = ["--model.net.dim=16", "--model.net.depth=2", "--model.net.image_size=8", "--model.net.channels=1"]
PICTURES = ["--data=Images", "--data.channels=1", "--data.holdout=0.2", "--model.net.num_classes=2"]


def stored(folder):
    (path,) = (folder / "runs").rglob("config.yaml")
    callbacks = yaml.safe_load(path.read_text())["trainer"]["callbacks"]
    return {each["class_path"].rpartition(".")[2]: each["init_args"] for each in callbacks if "init_args" in each}


def pictures(folder, count):
    tree(folder / "pictures", [f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(count // 2)])
    return [*NET, *PICTURES, f"--data.path={folder / 'pictures'}"]


@pytest.mark.slow
def test_a_short_run_on_few_pictures_evaluates_no_more_than_it_trains(tmp_path, monkeypatch):
    train(monkeypatch, tmp_path, "fit", *pictures(tmp_path, 500), "--trainer.max_steps=60")
    settings = stored(tmp_path)
    assert settings["GenerationMetrics"]["num"] is None
    assert settings["LinearProbes"]["max_train"] is None
    (run,) = (tmp_path / "runs").glob("*/version_0")
    (metrics,) = history.read(run / "generation.jsonl")
    (probes,) = history.read(run / "probes.jsonl")
    assert metrics.metadata["n"] == 128  # the least: 120 cost half of the training
    assert probes.metadata["train"] + probes.metadata["test"] <= 60 * 32 * 3 / 2 / 8
    assert 20 * 2 <= probes.metadata["test"] < probes.metadata["train"] < 400


@pytest.mark.slow
def test_few_pictures_have_no_metrics_and_these_are_not_missing_at_the_end(tmp_path, monkeypatch, caplog):
    words = [*pictures(tmp_path, 40), "--trainer.max_steps=1", "--ckpt_path=auto"]
    train(monkeypatch, tmp_path, "fit", *words)
    (run,) = (tmp_path / "runs").glob("*/version_0")
    assert not (run / "generation.jsonl").exists()
    assert (run / "probes.jsonl").exists()
    launches = (run / "launches.jsonl").read_bytes()
    train(monkeypatch, tmp_path, "fit", *words)
    find_line(caplog.messages, "nothing is left to do", "step 1")
    assert (run / "launches.jsonl").read_bytes() == launches


def test_the_digits_keep_the_numbers_of_their_configuration(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        train(monkeypatch, tmp_path, "fit", "--trainer.callbacks+=Summary", "--print_config")
    printed = capsys.readouterr().out
    assert "num: 1000\n" in printed
    assert "max_train: 10000\n" in printed
    assert "max_reference: 50000\n" in printed


def test_sizes_follow_data_and_run():
    digits = Digits(32)
    digits.setup()
    trainer = SimpleNamespace(
        datamodule=digits, limit_train_batches=1.0, accumulate_grad_batches=1, max_epochs=-1, max_steps=2000
    )
    probes = LinearProbes(max_train=None, every_n_steps=250)
    assert probes.affordable(trainer) == 2000 * 32 * 3 / 2 / 8
    sized = probes._size(trainer, SimpleNamespace(path=object()))
    assert sized.max_train + sized.max_test <= 2000 * 32 * 3 / 2 / 8 / 8
    noisy = LinearProbes(max_train=None, every_n_steps=250, noise_draws=4, noise_images=20)
    sized = noisy._size(trainer, SimpleNamespace(path=object()))
    assert 0 < sized.max_train + sized.max_test <= 2000 * 32 * 3 / 2 / 8 / 8 - 4 * 20
    at_end = LinearProbes(max_train=None)
    sizes = []
    for trainer.max_steps in (100, 200, 2000):  # as --minutes tries lengths, one after the other
        at_end.preparations(trainer, SimpleNamespace(path=object()))
        sizes.append(at_end.probing.max_test)
    assert sizes[0] < sizes[1] < sizes[2] == len(digits.test)
    trainer.max_steps = -1
    assert probes._size(trainer, SimpleNamespace(path=object())).max_train == len(digits.train)
    assert GenerationMetrics(SmallClassifier(), num=None).affordable(trainer) == float("inf")
