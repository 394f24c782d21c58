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
from official_files import TINY, our_encoder, ours, read_description, redescribe, save_contents, tiny, tiny_sit
from refusals import raises_user_error
from safetensors.torch import load_file, save_file

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.convert import export_file, import_official, official_state
from uvit_decay.checkpoint.official.common import build_on_meta
from uvit_decay.nn import MAE, SiT, ViT
from uvit_decay.nn.block import Mlp


def named(*names):
    return {name: torch.zeros(2) for name in names}


class Code:
    def __reduce__(self):
        return exec, ("raise SystemExit('code ran')",)


ITSELF = named("weight")
ITSELF["model"] = ITSELF
OPTIMIZER = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 1e-4}]}
OTHERS = {
    "empty": ({}, "nothing"),
    "step": (500_000, "int"),
    "optimizer": (OPTIMIZER, ("state", "param_groups")),
    "training": (
        {"steps": 3, "opt": OPTIMIZER, "average": tiny()},
        ("average", "U-ViT"),
    ),
    "unknown": (named("a.weight", "b.weight"), "a.weight, b.weight"),
    "list": ([torch.zeros(2)], "list"),
    "itself": (ITSELF, ("weight", "model")),
}  # fmt: skip


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
    "text": (b"hello, a checkpoint\n", "truncated"),
    "web-page": (b"\n<!DOCTYPE html><html>caf\xc3\xa9</html>", "web page"),
    "pickle": (pickle.dumps({"a": 1}), "code"),
    "code": (pickle.dumps(Code()), "code"),
    "bytes": (bytes(range(256)), "checkpoint"),
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


def test_a_link_to_itself_is_one_line(tmp_path):
    (tmp_path / "loop.pth").symlink_to("loop.pth")
    with raises_user_error("loop.pth", "exist"):
        imported_from(tmp_path / "loop.pth")


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    "contents",
    [
        tiny() | {"extra": Code()},
        *({"ema": tiny_sit(), "args": args} for args in (Namespace(ckpt=Code()), SimpleNamespace(ckpt=None), Code())),
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
        (tiny_sit(wiring="decayed"), "a SiT"),
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


@pytest.mark.parametrize("schedule", ["learnable", "constant", "constant-branch"])
def test_what_the_official_layout_cannot_express_is_refused(tmp_path, schedule):
    mae = our_encoder(tmp_path / "mae", MAE, **mae_reference.SMALL, schedule=schedule)
    for path in (ours(tmp_path, schedule=schedule), mae):
        with raises_user_error(schedule, ".safetensors"):
            export_file(path, tmp_path / "back.pth")
    assert not (tmp_path / "back.pth").exists()


@pytest.mark.parametrize("scale", [0.5, "kappa:0.7", "learned", "stream:0.8"])
def test_scaled_long_skips_are_refused(tmp_path, scale):
    path = ours(tmp_path, skip_scale=scale)
    with raises_user_error("skip_scale"):
        export_file(path, tmp_path / "back.pth")
    assert not (tmp_path / "back.pth").exists()
    export_file(path, tmp_path / "again.safetensors")
    assert load(tmp_path / "again.safetensors").net.config["skip_scale"] == scale


def test_a_learned_output_skip_is_refused(tmp_path):
    path = ours(tmp_path, output_skip="learned")
    with raises_user_error("output_skip", ".safetensors"):
        export_file(path, tmp_path / "back.pth")


def test_a_list_of_alphas_is_refused_too(tmp_path):
    path = ours(tmp_path, schedule=[1.0, 0.9] * 5)
    with raises_user_error("[[1.0, 1.0], [0.9, 1.0],", ".safetensors"):
        export_file(path, tmp_path / "back.pth")


@pytest.mark.parametrize("options", [dict(qk_norm=True), dict(norm_type="rms")], ids=["qk_norm", "rms"])
def test_norms_that_no_official_layout_has_are_refused_but_exported(tmp_path, options):
    path = ours(tmp_path, **options)
    message = ("qk_norm", "norm_type", ".safetensors")
    with raises_user_error(message):
        export_file(path, tmp_path / "back.pth")
    assert not (tmp_path / "back.pth").exists()
    export_file(path, tmp_path / "again.safetensors")
    net = load(tmp_path / "again.safetensors").net
    assert net.config.items() >= options.items()
    assert same(net.state_dict(), load_file(path))
    for other in (build_on_meta(kind, depth=2, **options) for kind in (SiT, ViT, MAE)):
        with raises_user_error(message):
            official_state(other, other.state_dict(), path)


def test_a_network_of_no_official_family_is_refused(tmp_path):
    path = ours(tmp_path)
    card = read_description(path)
    save_file(Mlp(2, 3).state_dict(), path, {"uvit_decay": json.dumps(card)})
    redescribe(path, net={"class_path": "uvit_decay.nn.block.Mlp", "init_args": {"dim": 2, "hidden": 3}})
    with raises_user_error("Mlp", "UViT", "SiT", "MAE", "ViT", ".safetensors"):
        export_file(path, tmp_path / "official.pth")


@pytest.mark.parametrize("name", ["model.bin", "model", "model.ckpt"])
def test_a_target_of_another_suffix_is_refused(trained, tmp_path, name):
    with raises_user_error(".safetensors", ".pth", ".pt"):
        export_file(trained, tmp_path / name)
    with raises_user_error(".safetensors"):
        import_official(Path("file.pth"), tmp_path / name, None, TINY)


@pytest.mark.parametrize("step", [True, -1, 10**30, 1.5, tiny()])
def test_a_folder_without_its_files_or_of_another_step_is_refused(tmp_path, step):
    folder, target = tmp_path / "7.ckpt", tmp_path / "ours.safetensors"
    save_contents(tiny(), folder / "nnet.pth")
    with raises_user_error("nnet_ema.pth"):
        import_official(folder, target, None, TINY)
    import_official(folder, target, "raw", TINY)
    assert load(target).card.step == 0
    save_contents(step, folder / "step.pth")
    with raises_user_error("step.pth"):
        import_official(folder, target, "raw", TINY)
