"""State_dicts inside wrappers and training files: DataParallel, torch.compile, FSDP, Lightning, DeiT and timm."""

import pytest
import torch
from conftest import same
from mae_reference import SMALL as SMALL_MAE
from mae_reference import finetuned_file
from official_files import TINY, TINY_ENCODER, import_and_load, save_contents, tiny, tiny_sit
from refusals import find_line, raises_user_error
from safetensors.torch import save_file

from uvit_decay.checkpoint.convert import read_official
from uvit_decay.checkpoint.options import ImportOptions
from uvit_decay.files.tensor_files import load_weights
from uvit_decay.files.wrapped_names import strip_wrappers

LIGHTNING = {"epoch": 3, "global_step": 700, "pytorch-lightning_version": "2.6.0", "optimizer_states": []}


def renamed(state, prefix):
    return {f"{prefix}{name}": value for name, value in state.items()}


def without_alphas(state):
    return {name: value for name, value in state.items() if name != "alphas"}


@pytest.mark.parametrize("prefix", ["module.", "model._orig_mod.net."])
def test_prefixes_in_any_order_are_taken_off_and_said(tmp_path, prefix):
    contents = renamed(tiny(), prefix)
    stored = read_official(save_contents(contents, tmp_path / "wrapped.pth"), None, TINY)
    assert same(without_alphas(stored.state), tiny())
    find_line(stored.notes, prefix)


def test_marks_within_names_are_those_of_compiled_and_sharded_blocks(tmp_path):
    inside = {}
    for name, value in tiny_sit().items():
        name = name.replace("blocks.0.", "blocks.0._orig_mod._checkpoint_wrapped_module.")
        inside[f"_fsdp_wrapped_module.{name}"] = value
    checkpoint = import_and_load(inside, tmp_path)
    assert same(checkpoint.net.state_dict(), import_and_load(tiny_sit(), tmp_path).net.state_dict())


def test_a_checkpoint_of_lightning_gives_its_step(tmp_path):
    contents = {**LIGHTNING, "state_dict": renamed(tiny(), "model.")}
    stored = read_official(save_contents(contents, tmp_path / "epoch=3-step=700.ckpt"), None, TINY)
    assert (stored.card.step, stored.card.weights) == (700, "raw")
    assert same(without_alphas(stored.state), tiny())


def test_a_network_among_other_modules_is_named_by_its_entry(tmp_path):
    state = renamed(tiny(seed=2), "net._orig_mod.") | renamed(tiny(seed=1), "ema_model.module.")
    path = save_contents({**LIGHTNING, "state_dict": state | {"vae.bias": torch.zeros(2)}}, tmp_path / "last.ckpt")
    with raises_user_error("last.ckpt", "`entry`"):
        read_official(path, None, TINY)
    with raises_user_error("state_dict.mine", "ema_model, net, vae"):
        read_official(path, None, ImportOptions(heads=2, entry="state_dict.mine"))
    for entry, weights, seed in (("state_dict.net", "raw", 2), ("state_dict.ema_model", "ema", 1)):
        stored = read_official(path, None, ImportOptions(heads=2, entry=entry))
        assert (stored.card.weights, stored.card.step) == (weights, 700)
        assert torch.equal(stored.state["pos_embed"], tiny(seed=seed)["pos_embed"])
        find_line(stored.notes, f"from its entry {entry}")


@pytest.mark.parametrize(("raw", "ema"), [("model", "model_ema"), ("state_dict", "state_dict_ema"), ("model", "ema")])
def test_the_entry_of_each_set_of_weights_is_found_and_named(tmp_path, raw, ema):
    values = finetuned_file(**SMALL_MAE)["model"]
    average = {name: value + 1 for name, value in values.items()}
    path = save_contents({raw: values, ema: average, "args": None}, tmp_path / "deit.pth")
    for weights, name, expected in ((None, ema, average), ("ema", ema, average), ("raw", raw, values)):
        stored = read_official(path, weights, TINY_ENCODER)
        assert same(without_alphas(stored.state), expected)
        find_line(stored.notes, f"{weights or 'ema'} weights from its entry {name},")
    save_contents({raw: values}, path)
    with raises_user_error("no ema weights", raw, "`weights` raw"):
        read_official(path, "ema", TINY_ENCODER)
    assert read_official(path, None, TINY_ENCODER).card.weights == "raw"


def test_two_entries_of_one_name_are_refused():
    with raises_user_error("file.pt", "norm.bias", "_orig_mod.norm.bias"):
        strip_wrappers({"norm.bias": 1, "_orig_mod.norm.bias": 2, "other": 3}, "file.pt")


def test_weights_of_extractors_may_be_wrapped(tmp_path, capsys):
    save_file(renamed({"a.weight": torch.ones(2), "b.weight": torch.zeros(2)}, "module."), tmp_path / "x.safetensors")
    assert load_weights(tmp_path / "x.safetensors", "weights").keys() == {"a.weight", "b.weight"}
    find_line(capsys.readouterr().err, "module.")
