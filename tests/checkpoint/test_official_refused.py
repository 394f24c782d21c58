"""Files of another kind, unreadable ones and targets that cannot be: refused in a line that says what it looks like."""

import json
import pickle
import shutil
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import mae_reference
import pytest
import torch
from conftest import same
from official_files import TINY, ours, read_description, redescribe, save_contents, tiny, tiny_sit
from refusals import raises_user_error
from safetensors.torch import load_file, save_file

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.convert import export_file, import_official, official_state
from uvit_decay.checkpoint.official.common import build_on_meta
from uvit_decay.nn import MAE, SiT, ViT
from uvit_decay.nn.layers import Mlp


def named(*names):
    return {name: torch.zeros(2) for name in names}


class Code:
    def __reduce__(self):
        return exec, ("raise SystemExit('code ran')",)


OPTIMIZER = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 1e-4}]}
OTHERS = {
    "empty": ({}, "nothing"),
    "step": (500_000, "int"),
    "training": ({"steps": 3, "opt": OPTIMIZER, "average": tiny()}, ("average", "U-ViT")),
    "unknown": (named("a.weight", "b.weight"), "a.weight, b.weight"),
    "list": ([torch.zeros(2)], "list"),
}


@pytest.mark.parametrize(("contents", "message"), OTHERS.values(), ids=OTHERS)
def test_another_file_is_refused_by_its_name(tmp_path, contents, message):
    path, target = save_contents(contents, tmp_path / "other.pth"), tmp_path / "ours.safetensors"
    with raises_user_error("other.pth", message):
        import_official(path, target, None, TINY)
    assert not target.exists()
    with raises_user_error("project", message):
        load(path)


UNREADABLE = {
    "none": (None, "exist"),
    "nothing": (b"", "truncated"),
    "web-page": (b"\n<!DOCTYPE html><html>caf\xc3\xa9</html>", "web page"),
    "pickle": (pickle.dumps({"a": 1}), "code"),
    "code": (pickle.dumps(Code()), "code"),
    "image": (b"\x89PNG\r\n\x1a\n" + bytes(300), "checkpoint"),
}


def imported_from(path):
    import_official(path, path.with_name("ours.safetensors"), None, TINY)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize(("contents", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_file_is_refused_in_one_line(tmp_path, contents, message, suffix, recwarn):
    path = tmp_path / f"bad{suffix}"
    if contents is not None:
        path.write_bytes(contents)
    if suffix == ".safetensors" and message in ("code", "truncated", "checkpoint"):
        message = "safetensors"
    for use in (load, imported_from):
        with raises_user_error(path, message):
            use(path)
    assert not recwarn.list


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "contents",
    [
        tiny() | {"extra": Code()},
        {"ema": tiny_sit(), "args": SimpleNamespace(ckpt=None)},
    ],
)
def test_a_file_with_code_or_of_other_classes_is_refused(tmp_path, contents, zipped):
    path = tmp_path / "0000007.pt"
    torch.save(contents, path, _use_new_zipfile_serialization=zipped)
    for use in (load, imported_from):
        with raises_user_error(path, "code"):
            use(path)


def test_our_own_files_need_no_import(trained, tmp_path):
    exported = tmp_path / "model.safetensors"
    export_file(trained, exported)
    for path in (shutil.copy(trained, tmp_path), exported):
        with raises_user_error("project"):
            imported_from(Path(path))


@pytest.mark.parametrize(
    ("contents", "kind"),
    [
        (tiny(), "U-ViT"),
        ({"ema": tiny_sit(), "args": Namespace(path_type="Linear")}, "a SiT"),
        (mae_reference.decayed_file(**mae_reference.SMALL), "an MAE"),
        (mae_reference.pretrained_file(**mae_reference.SMALL)["model"], "vision transformer"),
    ],
)
def test_a_reader_of_ours_says_how_to_import(tmp_path, contents, kind):
    path = save_contents(contents, tmp_path / "official.pth")
    for read in (load, lambda path: export_file(path, tmp_path / "ours.safetensors")):
        with raises_user_error(kind, "uvit-decay import"):
            read(path)


EXTRAS = {  # options of networks that no official layout has
    "skip_scale": dict(skip_scale="kappa:0.7"),
    "output_skip": dict(output_skip="learned"),
    "learnable": dict(schedule="learnable"),
    "constant-branch": dict(schedule="constant-branch"),
    "[[1.0, 1.0], [0.9, 1.0],": dict(schedule=[1.0, 0.9] * 5),
    "qk_norm": dict(qk_norm=True),
    "norm_type": dict(norm_type="rms"),
    "mlp": dict(mlp="swiglu"),
}


@pytest.mark.parametrize("name", EXTRAS)
def test_what_the_official_layout_cannot_express_is_refused_but_exported(tmp_path, name):
    path = ours(tmp_path, **EXTRAS[name])
    with raises_user_error(name, ".safetensors"):
        export_file(path, tmp_path / "back.pth")
    assert not (tmp_path / "back.pth").exists()
    export_file(path, tmp_path / "again.safetensors")
    assert same(load(tmp_path / "again.safetensors").net.state_dict(), load_file(path))


@pytest.mark.parametrize("kind", [SiT, ViT, MAE])
def test_norms_that_no_other_family_has_are_refused(kind):
    net = build_on_meta(kind, depth=2, qk_norm=True)
    with raises_user_error("qk_norm", ".safetensors"):
        official_state(net, net.state_dict(), Path("net.ckpt"))


def test_a_network_of_no_official_family_is_refused(tmp_path):
    path = ours(tmp_path)
    card = read_description(path)
    save_file(Mlp(2, 3).state_dict(), path, {"uvit_decay": json.dumps(card)})
    redescribe(path, net={"class_path": "uvit_decay.nn.layers.Mlp", "init_args": {"dim": 2, "hidden": 3}})
    with raises_user_error("Mlp", ".safetensors"):
        export_file(path, tmp_path / "official.pth")


def test_a_target_of_another_suffix_is_refused(trained, tmp_path):
    with raises_user_error(".safetensors", ".pth", ".pt"):
        export_file(trained, tmp_path / "model.ckpt")
    with raises_user_error(".safetensors"):
        import_official(Path("file.pth"), tmp_path / "model.ckpt", None, TINY)


def test_a_folder_without_its_files_or_of_another_step_is_refused(tmp_path):
    folder, target = tmp_path / "7.ckpt", tmp_path / "ours.safetensors"
    save_contents(tiny(), folder / "nnet.pth")
    with raises_user_error("nnet_ema.pth"):
        import_official(folder, target, None, TINY)
    import_official(folder, target, "raw", TINY)
    assert load(target).card.step == 0
    save_contents(1.5, folder / "step.pth")
    with raises_user_error("step.pth"):
        import_official(folder, target, "raw", TINY)
