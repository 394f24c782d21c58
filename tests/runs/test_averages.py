"""The average of the weights of a run: how much of it the initial weights are, and who is told."""

import pytest

from uvit_decay.runs.averages import initial_share


@pytest.mark.parametrize(
    ("updates", "arguments", "share"),
    [(60, (0.9999, False), 0.994), (2, (0.9999,), 0.1 * 2 / 11), (60, (0.9,), 0.0), (0, (0.9,), 1.0)],
)
def test_the_share_of_the_initial_weights_is_the_product_of_the_decays(updates, arguments, share):
    assert initial_share(updates, *arguments) == pytest.approx(share, abs=1e-3)
