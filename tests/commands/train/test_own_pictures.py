"""A user's own pictures: `--config pictures` is sized, named, started and timed by them."""

from pathlib import Path

import pytest
import torch
import yaml
from conftest import ROOT, print_config, tiny_task, tiny_trainer, train
from image_noise import tree
from refusals import find_line, refused

from uvit_decay.callbacks.periodic import Periodic
from uvit_decay.checkpoint import load
from uvit_decay.commands.train.length import Pace, count_fitting, round_down
from uvit_decay.data import Digits
from uvit_decay.doctor import Plan
from uvit_decay.doctor.rehearsal import rehearse
from uvit_decay.runs.settings import Settings

TINY = ["--model.net.dim=16", "--model.sampling.steps=2", "--model.net.depth=2", "--data.image_size=8"]
TINY.append("--trainer.precision=32-true")
CONFIG = ["fit", "--config=pictures"]
LAST = "--trainer.callbacks=[LastCheckpoint,{class_path: Preview, init_args: {rows: 1}}]"


@pytest.fixture
def pictures(tmp_path):
    """Twelve pictures in two class folders."""
    folder = tmp_path / "birds" / "train"
    tree(folder, [f"{kind}/{i}.png" for kind in ("owl", "wren") for i in range(6)])
    return folder


def settings_of(run: Path) -> Settings:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=False)["settings"]


def test_a_run_on_own_pictures_ends_in_its_minutes_and_goes_on_as_one_of_as_many_steps(
    pictures, tmp_path, monkeypatch, caplog
):
    words = [*CONFIG, *TINY, f"--data.path={pictures}", LAST]
    with monkeypatch.context() as patch:
        # However long the rest took on a busy machine.
        patch.setattr("uvit_decay.commands.train.length.seconds_left", lambda minutes, began: 2.0)
        train(monkeypatch, tmp_path, *words)
    run = tmp_path / "runs" / "birds" / "version_0"
    first = settings_of(run)
    steps = first["trainer.max_steps"]
    assert 0 < steps == load(run / "checkpoints" / "last.ckpt").card.step
    assert (first["data.batch_size"], first["model.net.num_classes"], first["data.flip"]) == (12, 2, False)
    find_line(caplog.messages, "--data.batch_size 12", "64")
    find_line(caplog.messages, f"--trainer.max_steps {steps}:", "steps per second")
    find_line(caplog.messages, "training begins from noise: checkpoints/cifar10.safetensors", "dim 128", "16")
    assert first.get("model.init_from") is None
    # The measurement before step 0 leaves no trace in weights, averages or order of the pictures.
    train(monkeypatch, tmp_path, *words, f"--trainer.max_steps={steps}", "--trainer.logger.experiment=typed")
    typed = tmp_path / "runs" / "typed" / "version_0" / "checkpoints" / "last.ckpt"
    ours, theirs = (torch.load(path, weights_only=False) for path in (run / "checkpoints" / "last.ckpt", typed))
    assert all(torch.equal(value, theirs["state_dict"][name]) for name, value in ours["state_dict"].items())
    # The printed command trains on in the same folder, under the cosine of the new length.
    (line,) = (message for message in caplog.messages if message.startswith("train on: "))
    longer = [word.strip("'") for word in line.split() if word.startswith(("--ckpt_path", "auto", "--trainer.max"))]
    assert longer == ["--ckpt_path", "auto", "--trainer.max_steps"]
    train(monkeypatch, tmp_path, *words, "--ckpt_path=auto", f"--trainer.max_steps={steps + 2}")
    assert load(run / "checkpoints" / "last.ckpt").card.step == steps + 2
    assert settings_of(run)["trainer.max_steps"] == steps + 2
    # A resumption without a length has the length of the run.
    train(monkeypatch, tmp_path, *words, "--ckpt_path=auto")
    assert yaml.safe_load((run / "config.yaml").read_text())["trainer"]["max_steps"] == steps + 2
    find_line(caplog.messages, "nothing is left to do")
    find_line(caplog.messages, "--minutes 15", f"step {steps + 2}")


def test_minutes_that_suffice_for_no_step_are_refused(pictures, tmp_path, monkeypatch, capsys):
    words = [*CONFIG, *TINY, f"--data.path={pictures}", LAST]
    find_line(refused(capsys, train, monkeypatch, tmp_path, *words, "--minutes=1e-6"), "--minutes 1e-06", "max_steps")
    find_line(refused(capsys, train, monkeypatch, tmp_path, *words, "--minutes=0"), "--minutes", "0")
    assert not list(tmp_path.rglob("*.ckpt"))


class Costly(Periodic):
    """An evaluation of 60 network evaluations, or one that is left out."""

    def __init__(self, obstacle=None, **when) -> None:
        super().__init__(**when)
        self.obstacle, self.prepared = obstacle, 0

    def find_obstacle(self, data):
        return self.obstacle

    def prepare_once(self, trainer, task) -> None:
        self.prepared += 1

    def evaluations(self, trainer, task) -> int:
        return 60

    def evaluate(self, trainer, task) -> None:
        raise AssertionError("a rehearsal evaluates nothing")


def test_minutes_count_what_evaluations_take_and_make_what_they_share(tmp_path):
    callbacks = Costly(every_n_steps=10), Costly("too few images")
    data = Digits(32)
    data.load()
    plan = Plan(tiny_trainer(tmp_path, *callbacks), tiny_task(), data)
    found = rehearse(plan, lambda callbacks: tiny_trainer(tmp_path, *callbacks, max_steps=3), Pace(plan))
    assert [callback.prepared for callback in callbacks] == [1, 0]
    assert found.evaluations == {callbacks[0]: 60}
    steps = count_fitting(plan, found, 100 * found.step)
    taken = [found.step * (n + callbacks[0].count_due(44, 0, n) * 60 / 3 / 32) for n in (steps, steps + 1)]
    assert taken[0] <= 100 * found.step < taken[1]
    assert count_fitting(plan, found, found.step / 2) == 0
    assert [round_down(steps) for steps in (0, 7, 99, 101, 1437)] == [0, 7, 99, 100, 1400]


@pytest.mark.slow
def test_few_pictures_have_no_metrics_and_these_are_not_missing_at_the_end(tmp_path, monkeypatch, caplog):
    tree(tmp_path / "pictures", [f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(20)])
    words = [*TINY[:3], "--data.image_size=8", f"--data.path={tmp_path / 'pictures'}"]
    words += ["--trainer.max_steps=1", "--ckpt_path=auto"]
    train(monkeypatch, tmp_path, "fit", *words)
    (run,) = (tmp_path / "runs").glob("*/version_0")
    assert not (run / "generation.jsonl").exists()
    launches = (run / "launches.jsonl").read_bytes()
    train(monkeypatch, tmp_path, "fit", *words)
    find_line(caplog.messages, "nothing is left to do", "step 1")
    assert (run / "launches.jsonl").read_bytes() == launches


def test_numbers_that_were_sized_to_the_run_are_read_from_configurations_of_ac8466d5(tmp_path, monkeypatch, capsys):
    former = (ROOT / "configs" / "pictures.yaml").read_text()
    former = former.replace("num: 256", "num: null").replace("max_reference: 2000", "max_reference: null")
    (tmp_path / "former.yaml").write_text(former)
    printed = print_config(monkeypatch, capsys, tmp_path, "fit", "--config=former.yaml")
    assert "num: 5000\n" in printed
    assert "max_reference: 50000\n" in printed


@pytest.mark.parametrize(
    ("flags", "begins"),
    [
        ([], "tensors from"),
        (["--model.init_from=null"], ""),
        (["--model.net.alpha_min=1.0"], "training begins from noise"),
    ],
)
def test_the_network_that_ships_is_the_start_where_it_fits(flags, begins, pictures, tmp_path, monkeypatch, caplog):
    words = [*CONFIG, f"--data.path={pictures}", "--trainer.fast_dev_run=1", "--data.image_size=8", *flags]
    train(monkeypatch, tmp_path, *words)
    found = [message for message in caplog.messages if "tensors from" in message or "begins from noise" in message]
    assert len(found) == bool(begins)
    assert begins in "".join(found)
