"""Files of the package by name."""

from pathlib import Path

import pytest
from conftest import ROOT

from uvit_decay.runtime import program
from uvit_decay.runtime.program import bundled, config_names, find_config, or_bundled


def test_in_a_checkout_they_lie_beside_the_package_in_a_wheel_inside(monkeypatch, tmp_path):
    assert bundled("configs/digits.yaml") == ROOT / "configs" / "digits.yaml"
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "digits.yaml").touch()
    monkeypatch.setattr(program, "PACKAGE", tmp_path)
    assert bundled("configs/digits.yaml") == tmp_path / "configs" / "digits.yaml"


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


@pytest.mark.parametrize("name", ["", "other", "/configs/digits.yaml", "mine/digits", "../digits", "{trainer: null}"])
def test_what_is_no_configuration_of_the_package_is_left_as_it_is(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == name


def test_names_are_those_of_the_folder():
    assert config_names() == sorted(path.stem for path in (ROOT / "configs").iterdir())


def test_a_bundled_checkpoint_unless_there_is_a_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    name = "checkpoints/digits.safetensors"
    assert or_bundled(name) == ROOT / name
    for other in ("checkpoints/none.ckpt", "checkpoints", f"../{tmp_path.name}/{name}", str(tmp_path / name)):
        assert or_bundled(other) == Path(other)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / name).touch()
    assert or_bundled(name) == Path(name)
