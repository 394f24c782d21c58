"""The public door: arguments of wrong types and impossible values are refused by one line that names the argument."""

import json

import numpy as np
import pytest
import torch
from refusals import raises_user_error
from torch import nn

from uvit_decay import decay
from uvit_decay.callbacks import EMA
from uvit_decay.decay import attach, shortcuts
from uvit_decay.nn import UViT
from uvit_decay.runtime.typed import check_types
from uvit_decay.tasks import Optimization

SIZES = {"image_size": 8, "patch_size": 4, "channels": 1, "dim": 8, "depth": 2, "heads": 2}


@pytest.fixture(scope="module")
def found(programs, tmp_path_factory):
    """Return what a program finds in whose process nothing else checks types."""
    program = programs.start("tests/shared/door.py", cwd=tmp_path_factory.mktemp("door"))
    assert program.wait() == 0, program.stderr
    return json.loads(program.stdout)


@pytest.mark.slow
def test_every_wrong_type_and_impossible_value_is_refused_by_a_line_that_names_the_argument(found):
    assert found["accepted"] == []


@pytest.mark.slow
def test_inputs_of_other_shapes_dtypes_and_values_are_refused_by_each_network(found):
    assert found["inputs"] == []


@pytest.mark.slow
def test_every_numeric_choice_and_path_argument_has_an_impossible_value(found):
    assert found["uncovered"] == []


def test_a_line_names_the_argument_the_types_and_the_value():
    with raises_user_error("EMA", "decay", "float", "'x'", "str"):
        EMA(decay="x")
    with raises_user_error("attach", "alpha_min", "float", "'0.7'"):
        attach(nn.Linear(2, 2), "0.7")
    with raises_user_error("Optimization", "lr", "float | None", "'1e-3'"):
        Optimization(lr="1e-3")
    with raises_user_error("UViT", "init", "official", "xavier", "'no'"):
        UViT(**SIZES, init="no")
    with pytest.raises(TypeError, match="alpha"):
        UViT(**SIZES, alpha=0.7)


def test_numbers_of_numpy_lists_and_strings_become_what_is_annotated():
    assert Optimization(betas=[0.9, 0.99]).betas == (0.9, 0.99)
    config = UViT(**SIZES, alpha_min=np.linspace(0.6, 1, 3)[1]).config
    assert type(config["alpha_min"]) is float
    assert type(UViT(**{**SIZES, "dim": np.int64(8)}).config["dim"]) is int


@check_types
def choose(schedule: "decay.Schedule") -> object:
    return schedule


def test_a_name_that_is_added_to_a_table_later_is_accepted(monkeypatch):
    with raises_user_error("choose", "schedule", "linear", "'late'"):
        choose("late")
    monkeypatch.setitem(decay.SHORTCUTS, "late", decay.SHORTCUTS["linear"])
    assert choose("late") == "late"


def test_each_item_of_further_arguments_is_checked():
    @check_types
    def total(start: int, *others: float, **options: object) -> float:
        return start + sum(others)

    assert total(1, 2, 0.5, name="a") == 3.5
    with raises_user_error("total", "others", "float", "'b'"):
        total(1, 2.0, "b")


@pytest.mark.parametrize("blocks", [0, 10**30, 10**5000], ids=["0", "1e30", "1e5000"])
def test_a_schedule_of_too_many_branches_is_refused_before_it_is_built(blocks):
    with raises_user_error("blocks"):
        shortcuts(blocks, 0.7)


class Backwards(nn.Module):
    """Two residual branches, of which the second one runs first."""

    def __init__(self):
        super().__init__()
        for name in ("norm1", "f1", "norm2", "f2"):
            self.add_module(name, nn.Linear(2, 2))

    def forward(self, x):
        x = x + self.f2(self.norm2(x))
        return x + self.f1(self.norm1(x))


def test_pairs_against_the_order_of_execution_are_refused_in_the_forward_pass():
    model = Backwards()
    x = torch.randn(3, 2)
    before = model(x)
    right = [("norm2", "f2"), ("norm1", "f1")]
    with attach(model, 0.7, pairs=right):
        model(x)
        model(x)
    with attach(model, 0.7, pairs=right[::-1]), raises_user_error("norm1", "pairs"):
        model(x)
    assert torch.equal(model(x), before)
