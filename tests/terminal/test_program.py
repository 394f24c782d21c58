"""Messages name the commands of this process, and files of the package, by their names."""

import sys
from pathlib import Path

import pytest
from conftest import ROOT

from uvit_decay.terminal import program
from uvit_decay.terminal.program import find_bundled, find_config, localise, or_bundled

TEXT = (
    "python train.py fit; torchrun --nproc_per_node 8 -- evaluate.py probe; accelerate launch \\\n    sample.py --num 4"
)


@pytest.mark.parametrize("name", ["train.py", "-c", "", "/x/uvit_decay/checkpoint/__main__.py"])
def test_a_script_is_a_script(monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [name])
    assert localise(TEXT) == TEXT


@pytest.mark.parametrize("name", ["/usr/bin/uvit-decay", "uvit_decay", "/x/uvit_decay/__main__.py"])
def test_a_command_of_the_package_is_one(monkeypatch, name):
    monkeypatch.setattr(sys, "argv", [name])
    wanted = "uvit-decay train fit; torchrun --nproc_per_node 8 -m -- uvit_decay evaluate probe; "
    assert localise(TEXT) == wanted + "accelerate launch \\\n    -m uvit_decay sample --num 4"
    assert localise("/home/me/train.py, evaluate.py: --test") == "/home/me/train.py, uvit-decay evaluate: --test"


def test_in_a_checkout_they_lie_beside_the_package_in_a_wheel_inside(monkeypatch, tmp_path):
    assert find_bundled("configs/digits.yaml") == ROOT / "configs" / "digits.yaml"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "digits.yaml").touch()
    monkeypatch.setattr(program, "PACKAGE", tmp_path)
    assert find_bundled("configs/digits.yaml") == tmp_path / "configs" / "digits.yaml"


@pytest.mark.parametrize("name", ["digits", "digits.yaml", "configs/digits", "configs/digits.yaml"])
def test_a_configuration_has_several_names(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == str(ROOT / "configs" / "digits.yaml")
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.mkdir()
    assert find_config(name) == str(ROOT / "configs" / "digits.yaml")  # a folder is no configuration
    path.rmdir()
    path.touch()
    assert find_config(name) == name


LONG = "seed_everything: 1\n" * 1000  # the text of a configuration


@pytest.mark.parametrize(
    "name", ["", "other", "/configs/digits.yaml", "mine/digits", "../digits", "{trainer: null}", LONG]
)
def test_what_is_no_configuration_of_the_package_is_left_as_it_is(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == name


def test_a_bundled_checkpoint_unless_there_is_a_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    name = "checkpoints/digits.safetensors"
    assert or_bundled(name) == ROOT / name
    for other in ("checkpoints/none.ckpt", "checkpoints", f"../{tmp_path.name}/{name}", str(tmp_path / name)):
        assert or_bundled(other) == Path(other)
