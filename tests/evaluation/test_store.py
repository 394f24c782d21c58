"""Features on disk: complete, or known to be incomplete; never those of something else."""

import pytest
import torch

from uvit_decay.errors import UserError
from uvit_decay.evaluation.extract import parts_of
from uvit_decay.evaluation.store import Store
from uvit_decay.metrics.frechet import Moments

PARTS = [range(0, 4), range(4, 8), range(8, 10)]


@pytest.fixture
def features():
    return torch.randn(10, 5, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def store(tmp_path, features):
    """With its second part missing."""
    store = Store(tmp_path / "features", {"of": "something"}, PARTS)
    assert store.open() == PARTS
    for part in (PARTS[0], PARTS[2]):
        store.add(part, {"features": features[list(part)]})
    return store


def test_what_is_there_is_used_again(store, features):
    again = Store(store.folder, {"of": "something"}, PARTS)
    assert again.open() == [PARTS[1]]
    again.add(PARTS[1], {"features": features[4:8], "pictures": torch.ones(4)})
    assert torch.equal(again.tensor("features"), features)
    assert torch.equal(again.tensor("pictures"), torch.ones(4))
    moments = Moments(5)
    moments.update(features)
    assert torch.equal(again.statistics().cov, moments.compute().cov)
    assert again.statistics().n == 10


@pytest.mark.parametrize(("about", "parts"), [({"of": "another"}, PARTS), ({"of": "something"}, [range(0, 10)])])
def test_features_of_something_else_are_refused(store, about, parts):
    with pytest.raises(UserError, match="keeps the features of another evaluation"):
        Store(store.folder, about, parts).open()


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with pytest.raises(UserError, match="is in the way"):
        Store(tmp_path, {}, PARTS).open()
    assert (tmp_path / "thesis.tex").read_text() == "all of it"


def test_a_damaged_part_is_removed_and_said(store):
    damaged = store.folder / "000000000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:40])
    with pytest.raises(UserError, match="was damaged .* run again"):
        store.tensor("features")
    assert store.open() == PARTS[:2]


@pytest.mark.parametrize("count", [1, 2, 23, 24, 25, 1000, 50_000])
def test_parts_are_consecutive_and_small_sets_have_work_for_many_processes(count):
    parts = parts_of(count)
    assert [i for part in parts for i in part] == list(range(count))
    assert max(map(len, parts)) <= 256
    assert len(parts) >= min(count, 12)
