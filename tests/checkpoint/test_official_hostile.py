"""Hostile official files: one line, at once."""

import functools

import pytest
import torch
from official_files import TINY, imported, saved, tiny, tiny_sit

from uvit_decay.checkpoint.convert import import_official
from uvit_decay.checkpoint.official.common import ImportOptions
from uvit_decay.runtime.errors import UserError


@pytest.mark.parametrize("state", [tiny, tiny_sit])
@pytest.mark.parametrize("number", ["1000000000", "9" * 5000, "40"])
def test_a_block_of_a_huge_number_is_refused_at_once(tmp_path, state, number):
    blocks = "in_blocks" if state is tiny else "blocks"
    contents = state() | {f"{blocks}.{number}.norm1.weight": torch.zeros(16)}
    with pytest.raises(UserError, match="looks like a .*, but it (has|lacks) "):
        imported(contents, tmp_path)


HOSTILE = {
    "alphas": tiny() | {"alphas": torch.zeros(0)},
    "alphas-kind": tiny() | {"alphas": torch.ones(10, dtype=torch.int64)},
    "no-text": {3: torch.zeros(2), None: torch.zeros(2)},
    "line-ends": {"a\nb": torch.zeros(2)},
    "expanded": tiny() | {"pos_embed": torch.zeros(1).expand(1, 10**10 + 1, 16)},
    "shared": functools.reduce(lambda inner, _: dict.fromkeys(map(str, range(1000)), inner), range(4), torch.zeros(1)),
    "decay": {"ema": tiny_sit(), "args": {"min_sigma": 10**400}},
}


@pytest.mark.parametrize("contents", HOSTILE.values(), ids=HOSTILE)
def test_hostile_contents_are_one_line(tmp_path, contents):
    with pytest.raises(UserError):
        imported(contents, tmp_path)


def test_a_dict_that_holds_itself_is_looked_into_no_further(tmp_path):
    contents = {"weight": torch.zeros(2)}
    contents["model"] = contents
    with pytest.raises(UserError, match="looks like a training checkpoint with the entries weight, model"):
        imported(contents, tmp_path)


def test_tensors_that_share_memory_are_imported_and_two_of_one_name_refused(tmp_path):
    state, names = tiny(), ("norm.bias", "norm.weight")
    both = torch.rand(2, 16)
    imported(state | dict(zip(names, both, strict=True)), tmp_path)
    imported(state | dict.fromkeys(names, both[0]), tmp_path)
    with pytest.raises(UserError, match=r"has both norm\.bias and module\.norm\.bias"):
        imported(state | {"module.norm.bias": both[0]}, tmp_path)


def test_a_choice_that_is_none_is_one_line():
    with pytest.raises(UserError, match="--path must be linear or gvp or .*, it is 'nope'"):
        ImportOptions(path="nope")


@pytest.mark.parametrize("step", [True, -1, 10**30, 1.5])
def test_a_step_must_be_a_number_of_steps(tmp_path, step):
    saved(tiny(), tmp_path / "7.ckpt" / "nnet_ema.pth")
    saved(step, tmp_path / "7.ckpt" / "step.pth")
    with pytest.raises(UserError, match="step.pth in .* should hold a number"):
        import_official(tmp_path / "7.ckpt", tmp_path / "ours.safetensors", None, TINY)


def test_a_link_to_itself_is_one_line(tmp_path):
    (tmp_path / "loop.pth").symlink_to("loop.pth")
    with pytest.raises(UserError, match="loop.pth does not exist"):
        import_official(tmp_path / "loop.pth", tmp_path / "ours.safetensors", None, TINY)
