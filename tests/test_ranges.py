"""Numbers and shapes that metrics, probes and sources of images cannot take are refused by a line that names them."""

import jaxtyping
import numpy as np
import pytest
import torch
from refusals import raises_user_error
from torch import nn

from uvit_decay.encoders import FeatureOptions, NetworkFeatures
from uvit_decay.evaluation import ArrayImages, open_images
from uvit_decay.metrics import kernel_distance, label_consistency, mind, precision_recall
from uvit_decay.representations import Reconstructor, cknna, knn_accuracy, logistic_grid
from uvit_decay.representations.features import TokenReader
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
    (lambda: label_consistency(torch.zeros(0, 3), ONE[:0]), "no images"),
    (lambda: kernel_distance(CELLS[0], CELLS[0], subset_size=1), "subset_size"),
    (lambda: mind(CELLS[0], CELLS[0][:0], 4), ("6", "0")),
    (lambda: precision_recall(CELLS[0], CELLS[0], k=0), "k"),
    (lambda: knn_accuracy(**SIDES, temperature=NAN), "temperature"),
    (lambda: knn_accuracy(**{**SIDES, "test_labels": ONE}), "test_labels"),
    (lambda: knn_accuracy(**{**SIDES, "train_labels": ONE}), "train_labels"),
    (lambda: knn_accuracy(**{**SIDES, "test": CELLS[:1]}), "test"),
    (lambda: logistic_grid(**{**SIDES, "test_labels": ONE}), "test_labels"),
    (lambda: logistic_grid(**SIDES, l2_grid=(0.1, NAN)), "l2_grid"),
    (lambda: logistic_grid(**SIDES, iterations=(4, 0)), "iterations"),
    (lambda: Reconstructor(nn.Identity(), mask_ratio="0.5"), "mask_ratio"),
    (lambda: TokenReader(nn.Identity(), None, torch.float, torch.device("cpu"), "float32", 0), "batch_size"),
    (lambda: cknna(neighbours(12), neighbours(13)), "b"),
    (lambda: neighbours(11), "k"),
    (lambda: open_images("digits:test", 2), "channels"),
    (lambda: FeatureOptions(compile="yes"), "compile"),
    (lambda: NetworkFeatures("none.ckpt", 3), "trusted"),
]


@pytest.mark.parametrize(("call", "fragments"), CASES)
def test_it_is_named(call, fragments):
    with raises_user_error(fragments):
        call()


def test_images_have_one_channel_or_three(tmp_path):
    np.savez(tmp_path / "grey.npz", arr_0=np.zeros((2, 4, 4, 1), np.uint8))
    with raises_user_error("channels", "5"):
        ArrayImages(tmp_path / "grey.npz", 5)
