"""How messages name the commands of this process."""

import sys

import pytest

from uvit_decay.runtime.program import from_package, localised

TEXT = (
    "python train.py fit; torchrun --nproc_per_node 8 -- evaluate.py probe; accelerate launch \\\n    sample.py --num 4"
)


@pytest.mark.parametrize("program", ["train.py", "/usr/bin/pytest", "-c", "", "/x/uvit_decay/checkpoint/__main__.py"])
def test_a_script_is_a_script(monkeypatch, program):
    monkeypatch.setattr(sys, "argv", [program])
    assert not from_package()
    assert localised(TEXT) == TEXT


@pytest.mark.parametrize("program", ["/usr/bin/uvit-decay", "uvit_decay", "/x/uvit_decay/__main__.py"])
def test_a_command_of_the_package_is_one(monkeypatch, program):
    monkeypatch.setattr(sys, "argv", [program])
    assert from_package()
    wanted = "uvit-decay train fit; torchrun --nproc_per_node 8 -m -- uvit_decay evaluate probe; "
    assert localised(TEXT) == wanted + "accelerate launch \\\n    -m uvit_decay sample --num 4"
    assert localised("/home/me/train.py, evaluate.py: --test") == "/home/me/train.py, uvit-decay evaluate: --test"
