"""Numbers and shapes that metrics and probes cannot take are refused by a line that names them."""

import jaxtyping
import pytest
import torch
from refusals import raises_user_error

from uvit_decay.metrics import label_consistency, mind
from uvit_decay.representations import cknna, knn_accuracy, logistic_grid
from uvit_decay.representations.reference import Neighbourhood

ONE, SIX = torch.zeros(1, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
CELLS = torch.randn(2, 6, 3)
SIDES = {"train": CELLS, "train_labels": SIX, "test": CELLS, "test_labels": SIX}
NAN = float("nan")


@pytest.fixture(autouse=True)
def as_users_call(monkeypatch):
    """Switch off the suite's own checks of signatures."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def neighbours(count):
    return Neighbourhood.of(torch.randn(count, 3))


CASES = [
    (lambda: label_consistency(torch.zeros(4, 3), ONE), "labels"),
    (lambda: mind(CELLS[0], CELLS[0][:0], 4), ("6", "0")),
    (lambda: knn_accuracy(**{**SIDES, "test_labels": ONE}), "test_labels"),
    (lambda: knn_accuracy(**{**SIDES, "train_labels": ONE}), "train_labels"),
    (lambda: knn_accuracy(**{**SIDES, "test": CELLS[:1]}), "test"),
    (lambda: logistic_grid(**{**SIDES, "test_labels": ONE}), "test_labels"),
    (lambda: logistic_grid(**SIDES, l2_grid=[0.1, NAN]), "l2_grid"),
    (lambda: logistic_grid(**SIDES, iterations=(4, 0)), "iterations"),
    (lambda: logistic_grid(**SIDES, l2_grid=()), ("l2 penalty", 6, 0)),
    (lambda: cknna(neighbours(12), neighbours(13)), "b"),
]


@pytest.mark.parametrize(("call", "fragments"), CASES)
def test_it_is_named(call, fragments):
    with raises_user_error(fragments):
        call()
