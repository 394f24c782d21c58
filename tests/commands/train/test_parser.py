"""Flags and configurations of train.py: hostile ones are one line each, before any work."""

import json

import pytest
from conftest import train
from refusals import find_line, refused

from uvit_decay.checkpoint import load

SMALL = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.max_steps=2", "--trainer.limit_val_batches=1"]
HUGE = str(10**22)
OF_NET = '{"class_path": "UViT", "init_args": {"dimm": 5}}'
OF_MODEL = '{"class_path": "DiffusionTask", "init_args": {"net": ' + OF_NET + "}}"
LIGHTNING = "lightning.pytorch.callbacks."


def refuses(monkeypatch, capsys, folder, *flags):
    """Return the one line that refuses these flags, and check that no run is left."""
    line = refused(capsys, train, monkeypatch, folder, "fit", *flags)
    assert not list(folder.glob("runs/digits/*"))
    return line


def callback(name, package="uvit_decay.callbacks.", **init_args):
    """Return the flag of a run with this callback alone."""
    return ["--trainer.callbacks", json.dumps([{"class_path": package + name, "init_args": init_args}])]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trainer.devices", "abc"], "devices"),
        (["--trainer.accumulate_grad_batches", "0"], "--trainer.accumulate_grad_batches 0"),
        (["--trainer.overfit_batches", "2"], ("overfit_batches 2", "--data.path")),
        (["--seed_everything=-1"], "seed_everything must be"),
        (["--seed_everything=true"], ("--seed_everything", "int", True)),
        (["--model.compile", "abc"], ("compile", "true", "false")),
        (["--model.net.dim", HUGE], ("dim", 1)),
        (["--model.net.mlp_ratio", "-1"], ("mlp_ratio", "(0, 1000]", "-1")),
        (["--model.net.dim", "65536", "--model.net.mlp_ratio", "999"], "memory"),
        (["--model.label_dropout", "null"], ("label_dropout", "float", "None")),
        (callback("Preview", rows=200, columns=200), ("images", 1, 10000)),
        (callback("LastCheckpoint", keep_every_n_steps=None), ("--trainer.callbacks.keep_every_n_steps", "int")),
        (["--config", "binary.yaml"], "binary.yaml"),
        (["--config=text.yaml"], "text.yaml"),
        (["-c", "/dev/zero"], "/dev/zero"),
        (["--config", "deep.yaml"], ("deep.yaml", "depth")),
        (["--config", "missing.yaml"], ("missing.yaml", "digits, digits_sit")),
        (["--config", "odd.yaml"], "trainr"),
        (["--config", "digits", "--config", "number.yaml"], ("--trainer", "settings", 100)),
        (["--model.auxiliary.weight", "0.25"], ("--model.auxiliary", "LayerSync")),
        (["--trust", "own_tasks", "--model", "own_tasks.Mine"], ("--model", "no class Mine")),
        (["--config", "base60.yaml"], ("--trainer.log_every_n_steps", "int", "1:30")),
        (["--model.net.skip_scale", "stream"], ("skip_scale", "stream")),
        (["--model.alpha", "0.7"], "--model.alpha"),
        (
            ["--model.auxiliary+=LayerSync", "--model.auxiliary.student=2", "--model.auxiliary.reference=1"],
            ("--model.auxiliary.student", "layer 2", "--model.auxiliary.reference"),
        ),
        (["--model.auxiliary+=DispersiveLoss", "--data.batch_size=1"], ("DispersiveLoss", "--data.batch_size")),
        (["--model.auxiliary+=REPA", "--model.auxiliary.teacher=mae.ckpt"], "mae.ckpt"),
        (["--data=Images", "--data.path=missing"], ("--data.path", "missing")),
        (["--model.net.schedule=attnres", "--model.net.alpha_min=0.7"], "--model.net.alpha_min"),
        (["--data=Images", "--data.path=.", "--data.image_size=[32,64]"], ("--data.image_size", "int")),
        (["--data", "uvit_decay.data.cifar._CIFAR"], ("--data", "abstract")),
        (["--config", "my pictures.yaml"], ("--config", "my pictures.yaml")),
        (["--trainer.maximum", "3"], "--trainer.maximum"),
        (["--trainer.max_steps", "ten"], ("--trainer.max_steps", "int", "ten")),
        (["--minutes", "1:00"], ("--minutes", "float", "1:00")),
        (["--minutes", "0"], ("--minutes", "(0, inf)")),
        (["--model.optim.lr=-1"], ("--model.optim.lr", "(0, inf)")),
        (["--model.net", "elsewhere.Net"], "--trust elsewhere.Net"),
        (["--data.seed", "3"], "--seed_everything"),
        (["--ckpt_path", "missing.ckpt"], "missing.ckpt"),
        (["--trainer.accelerator", "abacus"], "abacus"),
        (["--trainer.precision", "bf16-true"], ("--trainer.precision", "16-mixed", "bf16-true")),
        (["--trainer.precision", "16-mixed"], "--trainer.precision 16-mixed needs a CUDA GPU"),
        (["--trainer.logger", "MLFlowLogger"], "pip install -U 'mlflow>=1.0.0'"),
        (["--trainer.strategy", "fsdp_cpu_offload"], "fsdp"),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, list) else "",
)
def test_a_hostile_value_is_one_line_before_any_work(tmp_path, monkeypatch, capsys, flags, message):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x80trainer")
    (tmp_path / "text.yaml").write_text("# a comment\ntrainer\n")
    (tmp_path / "deep.yaml").write_text("trainer: " + "[" * 5000)
    (tmp_path / "odd.yaml").write_text("trainr: {max_steps: 3}\n")
    (tmp_path / "number.yaml").write_text("trainer: 100\n")
    (tmp_path / "own_tasks.py").touch()
    (tmp_path / "base60.yaml").write_text("trainer: {log_every_n_steps: 1:30}\n")
    small = [] if {"--config", "-c", "--config=text.yaml"} & {*flags} else SMALL
    line = refuses(monkeypatch, capsys, tmp_path, *small, *flags)
    find_line(line, message)
    for word in ("`--", "NestedArg"):
        assert word not in line


BEHIND_A_MODULE = f"{LIGHTNING}model_checkpoint.os.system"
OWN = """from lightning.pytorch import Callback
class Mine(Callback):
    def on_fit_start(self, trainer, task):
        print("mine is called")
"""


@pytest.mark.parametrize(
    ("class_path", "init_args", "named"),
    [
        ("LambdaCallback", {"on_fit_start": "os.system"}, "lambda_function.LambdaCallback"),
        ("StochasticWeightAveraging", {"swa_lrs": 0.1, "avg_fn": "os.system"}, "os.system"),
        ("StochasticWeightAveraging", {"swa_lrs": 0.1, "avg_fn": BEHIND_A_MODULE}, "posix.system"),
        ("own_callbacks.Mine", {}, "own_callbacks.Mine"),
        ("subprocess.Popen", {"args": ["true"]}, "subprocess.Popen"),
    ],
)
def test_a_configuration_names_what_is_trusted(tmp_path, monkeypatch, capsys, class_path, init_args, named):
    (tmp_path / "own_callbacks.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    flags = callback(class_path, "" if "." in class_path else LIGHTNING, **init_args)
    line = refuses(monkeypatch, capsys, tmp_path, *SMALL, *flags)
    find_line(line, "--trust", named)


def test_a_schedule_of_ones_own_is_trusted_by_a_flag_and_its_checkpoint_is_read_without(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_schedules.py").write_text("def falling(count):\n    return [1 - k / 40 for k in range(count)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    flags = ["--model.net.schedule", "own_schedules.falling", "--model.net.alpha_min", "1.0"]
    flags += callback("LastCheckpoint")
    find_line(refuses(monkeypatch, capsys, tmp_path, *SMALL, *flags), "--trust own_schedules.falling")
    train(monkeypatch, tmp_path, "fit", *SMALL, *flags, "--trust", "own_schedules.falling")
    (path,) = tmp_path.rglob("last.ckpt")
    net = load(path).net
    assert net.shortcuts.alphas == tuple(1 - k / 40 for k in range(6))
    assert net.config["schedule"][1] == [1 - 1 / 40, 1.0]


@pytest.mark.parametrize(
    ("flags", "wrong", "right"),
    [
        (["--lr", "1e-4"], "--lr", "--model.optim.lr"),
        (["--cfg", "2"], "--cfg", "--config"),
        (["--max_steps", "2"], "--max_steps", "--trainer.max_steps"),
        (["--model.optim.lrr", "1"], "--model.optim.lrr", "--model.optim.lr"),
        (["--data", "Imagez"], ("--data", "Imagez"), "Images"),
        (["--model.path", "linear"], ("--model.path", "linear"), "Linear"),
        (["--model.net.schedule", "lineer"], ("--model.net.schedule", "lineer"), "linear"),
        (["--model.net", OF_NET], "--model.net.dimm", "--model.net.dim"),
        (["--model", OF_MODEL], "--model.net.dimm", "--model.net.dim"),
        (["--model.optim", '{"lrr": 1}'], "--model.optim.lrr", "--model.optim.lr"),
        (["--model.optim.schedule", "cosin"], ("--model.optim.schedule", "cosin"), "cosine"),
        (["--trainer.callbacks+=Previeww"], ("--trainer.callbacks", "Previeww"), "Preview"),
        (["--trainer.callbacks+=Preview", "--trainer.callbacks.colums=3"], "--trainer.callbacks.colums", "columns"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_a_mistyped_flag_or_class_has_the_right_one_in_our_words(tmp_path, monkeypatch, capsys, flags, wrong, right):
    line = refuses(monkeypatch, capsys, tmp_path, *flags)
    find_line(line, wrong, right)
    for word in ("dot import path", "<class", "NestedArg", "subclass", "Parser key"):
        assert word not in line
    assert line.count("did you mean") == 1


def test_a_poor_match_is_not_suggested_but_the_classes_are_named(tmp_path, monkeypatch, capsys):
    line = refuses(monkeypatch, capsys, tmp_path, "--data", "ImageFolder")
    find_line(line, "--data", "ImageFolder", "Images", "CIFAR10", "Digits")
    assert "did you mean" not in line
    assert "did you mean" not in refuses(monkeypatch, capsys, tmp_path, "--trainer.magic", "3")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fit", "--trust"], "--trust: expected one argument"),
        (["fti"], ("fit, validate, doctor", "fti")),
        ([], "subcommands of train.py are fit, validate, doctor: got nothing"),
        (["--trainer.max_steps", "3"], "subcommands of train.py are fit, validate, doctor: got --trainer.max_steps"),
    ],
)
def test_what_is_no_whole_command_is_one_line(tmp_path, monkeypatch, capsys, words, message):
    find_line(refused(capsys, train, monkeypatch, tmp_path, *words), message)
