"""Features on disk are complete, or known to be incomplete, and never belong to something else."""

from pathlib import Path

import pytest
import torch
from refusals import raises_user_error

from uvit_decay.evaluation.feature_store import FeatureStore
from uvit_decay.metrics.frechet import Moments

IMAGES = torch.ones(4, 3, 2, 2, dtype=torch.uint8)
PARTS = [range(0, 4), range(4, 8), range(8, 10)]


@pytest.fixture
def features():
    return torch.randn(10, 5, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def store(tmp_path, features):
    """Return a store whose second part is missing."""
    store = FeatureStore(tmp_path / "features", {"of": "something"}, PARTS)
    assert store.open() == PARTS
    for part in (PARTS[0], PARTS[2]):
        store.add(part, {"features": features[list(part)]})
    return store


def test_what_is_there_is_used_again(store, features):
    again = FeatureStore(store.folder, {"of": "something"}, PARTS)
    assert again.open() == [PARTS[1]]
    again.add(PARTS[1], {"features": features[4:8], "images": IMAGES})
    assert torch.equal(again.tensor("features"), features)
    assert torch.equal(again.tensor("images"), IMAGES)
    moments = Moments(5)
    moments.update(features)
    assert torch.equal(again.statistics().cov, moments.compute().cov)


@pytest.mark.parametrize(("about", "parts"), [({"of": "another"}, PARTS), ({"of": "something"}, [range(0, 10)])])
def test_features_of_something_else_are_refused(store, about, parts):
    with raises_user_error(store.folder, "`out`"):
        FeatureStore(store.folder, about, parts).open()


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("all of it")
    with raises_user_error(tmp_path):
        FeatureStore(tmp_path, {}, PARTS).open()
    assert (tmp_path / "thesis.tex").read_text() == "all of it"


@pytest.fixture
def whole(store, features):
    store.add(PARTS[1], {"features": features[4:8], "calls": torch.tensor([7])})
    return store


def again(store):
    return FeatureStore(store.folder, store.metadata, PARTS)


DAMAGE = {
    "swapped": lambda path: path.write_bytes(path.with_name("000000000.safetensors").read_bytes()),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:40]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_part_that_is_not_what_was_kept_is_made_anew_with_one_remark(whole, features, damage, capsys):
    path = whole.folder / "000000004.safetensors"
    DAMAGE[damage](path)
    reopened = again(whole)
    assert reopened.open() == [PARTS[1]]
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert str(path) in message
    reopened.add(PARTS[1], {"features": features[4:8]})
    assert torch.equal(reopened.tensor("features"), features)


@pytest.mark.parametrize("wrong", [torch.zeros(3, 5), torch.zeros(4, 5).half(), torch.ones(4, 5) / 0])
def test_what_an_extractor_must_not_return_is_one_line(store, wrong):
    with raises_user_error("4 images", "float32"):
        store.add(PARTS[1], {"features": wrong})


def test_a_removal_that_was_interrupted_is_no_obstacle(whole, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path: removed_once(path))
        with pytest.raises(KeyboardInterrupt):
            whole.remove()
    assert len(again(whole).open()) == 1


def removed_once(path):
    path.rename(path.with_name(".removed"))
    raise KeyboardInterrupt


def test_what_a_kill_left_of_a_part_is_removed(store):
    (store.folder / ".000000000.safetensors.01234567.partial").touch()
    again(store).open()
    assert {path.name[0] for path in store.folder.iterdir()} == {"0", "a"}
