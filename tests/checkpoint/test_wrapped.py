"""State_dicts inside wrappers: Lightning, DataParallel, torch.compile, FSDP and EMA, in any order."""

import pytest
import torch
from conftest import same
from mae_reference import SMALL as SMALL_MAE
from mae_reference import decayed_file
from official_files import TINY, TINY_MAE, import_and_load, save_contents, tiny, tiny_sit
from refusals import find_line, raises_user_error
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from uvit_decay.checkpoint.convert import read_official
from uvit_decay.checkpoint.detect import SIT, UVIT, looks_like
from uvit_decay.runtime.tensor_files import load_weights
from uvit_decay.runtime.wrapped_names import remove_prefix

LIGHTNING = {"epoch": 3, "global_step": 700, "pytorch-lightning_version": "2.6.0", "optimizer_states": []}


def renamed(state, prefix):
    return {f"{prefix}{name}": value for name, value in state.items()}


@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.", "model._orig_mod.net.", "denoiser.module."],
)
def test_prefixes_in_any_order_are_taken_off_and_said(tmp_path, prefix):
    contents = renamed(tiny(), prefix)
    stored = read_official(save_contents(contents, tmp_path / "wrapped.pth"), None, TINY)
    assert same({name: value for name, value in stored.state.items() if name != "alphas"}, tiny())
    for part in prefix.split(".")[:-1]:
        find_line(stored.notes, f"{part}.")


def test_marks_within_names_are_those_of_compiled_and_sharded_blocks(tmp_path):
    inside = {}
    for name, value in tiny_sit().items():
        name = name.replace("blocks.0.", "blocks.0._orig_mod._checkpoint_wrapped_module.")
        inside[f"_fsdp_wrapped_module.{name}"] = value
    checkpoint = import_and_load(inside, tmp_path)
    assert same(checkpoint.net.state_dict(), import_and_load(tiny_sit(), tmp_path).net.state_dict())


def test_a_checkpoint_of_lightning_gives_its_step_and_leaves_other_modules_out(tmp_path):
    state = renamed(tiny(), "model.") | {"vae.encoder.conv_in.bias": torch.zeros(2)}
    path = save_contents({**LIGHTNING, "state_dict": state}, tmp_path / "epoch=3-step=700.ckpt")
    stored = read_official(path, None, TINY)
    assert (stored.card.step, stored.card.weights) == (700, "raw")
    find_line(stored.notes, 1, "vae.encoder.conv_in.bias", "model.")
    with raises_user_error(path, "--weights raw"):
        read_official(path, "ema", TINY)


@pytest.mark.parametrize(("weights", "seed"), [(None, 1), ("ema", 1), ("raw", 2)])
def test_an_average_beside_the_network_is_either_set_of_weights(tmp_path, weights, seed):
    state = renamed(tiny(seed=2), "net._orig_mod.") | renamed(tiny(seed=1), "ema_model.module.")
    path = save_contents({**LIGHTNING, "state_dict": state}, tmp_path / "last.ckpt")
    stored = read_official(path, weights, TINY)
    assert stored.card.weights == (weights or "ema")
    assert torch.equal(stored.state["pos_embed"], tiny(seed=seed)["pos_embed"])


def test_the_average_of_torch_has_a_counter(tmp_path):
    averaged = AveragedModel(nn.Linear(2, 2)).state_dict()
    assert averaged.keys() == {"n_averaged", "module.weight", "module.bias"}
    contents = renamed(tiny(), "module.") | {"n_averaged": averaged["n_averaged"]}
    assert same(
        import_and_load(contents, tmp_path).net.state_dict(), import_and_load(tiny(), tmp_path).net.state_dict()
    )


def test_entries_of_training_files_may_be_wrapped(tmp_path):
    contents = {"ema": renamed(tiny_sit(), "_orig_mod."), "model": renamed(tiny_sit(seed=2), "module._orig_mod.")}
    import_and_load(contents, tmp_path)
    mae = decayed_file(**SMALL_MAE, min_decay=0.7)
    wrapped = {**mae, "model": renamed(mae["model"], "_orig_mod.")}
    names = import_and_load(mae, tmp_path, TINY_MAE).net.state_dict()
    assert same(import_and_load(wrapped, tmp_path, TINY_MAE).net.state_dict(), names)


def test_two_networks_and_two_entries_of_one_name_are_refused(tmp_path):
    contents = renamed(tiny(), "student.") | renamed(tiny(), "teacher.")
    with raises_user_error(2, "student.", "teacher."):
        import_and_load(contents, tmp_path)
    with raises_user_error("file.pt", "norm.bias", "_orig_mod.norm.bias"):
        remove_prefix({"norm.bias": 1, "_orig_mod.norm.bias": 2}, "", "file.pt")


def test_wrapped_files_are_named_by_their_kind():
    assert looks_like(renamed(tiny(), "model.")) == UVIT
    assert SIT in looks_like({"state_dict": renamed(tiny_sit(), "net._orig_mod.")})


def test_weights_of_extractors_may_be_wrapped(tmp_path, capsys):
    save_file(renamed({"a.weight": torch.ones(2), "b.weight": torch.zeros(2)}, "module."), tmp_path / "x.safetensors")
    assert load_weights(tmp_path / "x.safetensors", "weights").keys() == {"a.weight", "b.weight"}
    find_line(capsys.readouterr().err, "module.")
    save_file({"a.weight": torch.ones(2), "a.bias": torch.ones(2), "b": torch.ones(1)}, tmp_path / "x.safetensors")
    assert load_weights(tmp_path / "x.safetensors", "weights").keys() == load_file(tmp_path / "x.safetensors").keys()
    assert not capsys.readouterr().err
