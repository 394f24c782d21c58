"""Official U-ViT files are recognised, imported as the same function, and exported."""

from dataclasses import asdict

import pytest
import torch
from conftest import same
from official_files import (
    CASES,
    HERE,
    TINY,
    import_and_load,
    is_close,
    meta,
    read_description,
    save_contents,
    tiny,
)
from refusals import find_line, raises_user_error
from safetensors.torch import load_file
from uvit_reference import SMALL, inputs, official_forward, official_shapes

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.convert import export_file, import_official, recognise
from uvit_decay.checkpoint.options import ImportOptions
from uvit_decay.diffusion.noise_path import VP, SDDiscrete
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.nn import UViT
from uvit_decay.nn.sizes import UVIT_SIZES

EULER_MARUYAMA, DPM = Sampling("uvit-em", 1000, clip=False), Sampling("uvit-dpm", 50, clip=False)
PIXELS_32, PIXELS_64 = dict(image_size=32, channels=3), dict(image_size=64, channels=3)
LATENTS_32, LATENTS_64 = dict(image_size=32, channels=4), dict(image_size=64, channels=4)
PUBLISHED = [
    # size, image, rows for labels, parameters, classes, path, sampling
    ("uvit-s/2", PIXELS_32, 0, 44_255_328, 0, VP(), EULER_MARUYAMA),
    ("uvit-s/2", PIXELS_32, 10, 44_260_960, 10, VP(), DPM),
    ("uvit-s/2", PIXELS_32, 100, 44_307_040, 100, VP(), DPM),
    ("uvit-s-deep/2", PIXELS_32, 0, 57_908_320, 0, VP(), EULER_MARUYAMA),
    ("uvit-s/4", PIXELS_64, 0, 44_292_228, 0, VP(), EULER_MARUYAMA),
    ("uvit-m/4", PIXELS_64, 1000, 130_940_292, 1000, VP(), DPM),
    ("uvit-l/4", PIXELS_64, 1000, 286_827_652, 1000, VP(), DPM),
    ("uvit-l/2", LATENTS_32, 1001, 286_763_172, 1000, VP(), Sampling("uvit-dpm", 50, 1.4, False)),
    ("uvit-h/2", LATENTS_32, 1001, 500_832_016, 1000, SDDiscrete(), Sampling("uvit-dpm++", 50, 1.4, False)),
    ("uvit-l/4", LATENTS_64, 1001, 286_861_524, 1000, VP(), Sampling("uvit-dpm", 50, 1.7, False)),
    ("uvit-h/4", LATENTS_64, 1001, 500_942_656, 1000, SDDiscrete(), Sampling("uvit-dpm++", 50, 1.7, False)),
    ("uvit-m/2", LATENTS_32, 0, 130_122_404, 0, VP(), DPM),
    ("uvit-m/2", LATENTS_32, 100, 130_199_972, 100, VP(), DPM),
    ("uvit-m/2", LATENTS_32, 101, 130_200_740, 100, VP(), Sampling("uvit-dpm", 50, 1.4, False)),
]


@pytest.mark.parametrize(("name", "image", "rows", "count", "classes", "path", "sampling"), PUBLISHED)
def test_published_configurations_are_recognised(name, image, rows, count, classes, path, sampling):
    size, patch_size = name.split("/")
    options = UVIT_SIZES[size] | image | dict(patch_size=int(patch_size))
    state = meta(official_shapes(**options, num_classes=rows, null_label=False))
    model = recognise(state, ImportOptions(), HERE)
    net, card = model.net, model.card("file.pth")
    time_scale = 999.0 if path == VP() else 1000.0
    assert (model.size, net.num_classes, net.null_label, net.time_scale) == (size, classes, rows > classes, time_scale)
    assert {key: net.config[key] for key in options} == options
    assert net.shortcuts.alphas == (1.0,) * (2 * options["depth"] + 2)
    assert card.path.class_path == f"uvit_decay.diffusion.noise_path.{type(path).__name__}"
    assert card.sampling == sampling
    assert card.class_names == tuple(str(label) for label in range(classes))
    assert (card.latents is not None) == (image["channels"] == 4)
    assert f"{name} ({options['heads']} heads, {count:,} parameters)" in model.summary()


@pytest.mark.parametrize(("rows", "classes"), [(11, 10), (101, 100), (10, 10), (12, 12)])
def test_a_null_label_is_guessed_from_the_rows_or_said(rows, classes):
    state = tiny(num_classes=rows, null_label=False)
    guessed = recognise(state, TINY, HERE).net
    assert (guessed.num_classes, guessed.null_label) == (classes, classes < rows)
    for said in (rows, rows - 1):
        net = recognise(state, ImportOptions(heads=2, num_classes=said), HERE).net
        assert (net.num_classes, net.null_label) == (said, said < rows)


def test_what_is_said_comes_before_what_is_published():
    state = meta(official_shapes(**UVIT_SIZES["uvit-h"], patch_size=2, **LATENTS_32))
    model = recognise(state, ImportOptions(path="vp", vae="my/vae", alpha_min=0.7), HERE)
    assert (model.path, model.net.time_scale, model.net.config["alpha_min"]) == ("vp", 999.0, 0.7)
    assert asdict(model.latents) == {
        "vae": "my/vae", "sha256": "", "scale": 0.18215, "shift": 0.0, "channels": 4, "factor": 8, "rgb": None,
        "channel_mean": None, "channel_std": None,
    }  # fmt: skip
    other = recognise(state, ImportOptions(heads=12), HERE)  # no published network: nothing of H is taken over
    assert (other.size, other.net.config["heads"], other.path) == (None, 12, "vp")


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_a_file_is_told_by_names_and_shapes_is_the_official_function_and_goes_back(tmp_path, options):
    state, config = tiny(**options), SMALL | options
    checkpoint = import_and_load(state, tmp_path)
    x, t, y = inputs(**config)
    assert is_close(checkpoint.net(x, t, y), official_forward(state, x, t, y, **config))
    assert checkpoint.net.config == UViT(**config).config
    card = checkpoint.card
    assert (card.prediction, card.step, card.weights, checkpoint.path) == ("eps", 0, "ema", VP())
    assert (card.latents is None) == (config["channels"] != 4)
    find_line(export_file(tmp_path / "ours.safetensors", tmp_path / "back.pth"), "official", ".safetensors")
    assert same(torch.load(tmp_path / "back.pth", weights_only=True), state)


def test_a_discrete_network_is_told_the_number_of_its_level(tmp_path):
    checkpoint = import_and_load(tiny(), tmp_path, ImportOptions(heads=2, path="sd-discrete"))
    assert checkpoint.path == SDDiscrete()
    x, t, _ = inputs()
    assert is_close(checkpoint.net(x, t), official_forward(tiny(), x, t, time_scale=1000.0, **SMALL))


def test_other_forms_of_a_file_are_the_same_network(tmp_path):
    """Entry names of DataParallel, and files in the format of torch before 1.6."""
    expected = import_and_load(tiny(), tmp_path).net.state_dict()
    parallel = {f"module.{name}": value for name, value in tiny().items()}
    assert same(import_and_load(parallel, tmp_path).net.state_dict(), expected)
    torch.save(tiny(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    import_official(tmp_path / "old.pth", tmp_path / "ours.safetensors", None, TINY)
    assert same(load(tmp_path / "ours.safetensors").net.state_dict(), expected)


def test_tensors_that_share_memory_are_imported(tmp_path):
    both = torch.rand(2, 16)
    import_and_load(tiny() | {"norm.bias": both[0], "norm.weight": both[1]}, tmp_path)
    import_and_load(tiny() | {"norm.bias": both[0], "norm.weight": both[0]}, tmp_path)


@pytest.mark.parametrize(("weights", "seed"), [(None, 1), ("ema", 1), ("raw", 2)])
def test_an_official_folder_gives_its_step_and_either_weights(tmp_path, weights, seed):
    folder = tmp_path / "500000.ckpt"
    save_contents(500_000, folder / "step.pth")
    save_contents(tiny(seed=1), folder / "nnet_ema.pth")
    save_contents(tiny(seed=2), folder / "nnet.pth")
    import_official(folder, tmp_path / "ours.safetensors", weights, TINY)
    checkpoint = load(tmp_path / "ours.safetensors")
    card = checkpoint.card
    assert (card.step, card.weights, card.data) == (500_000, weights or "ema", "unknown, imported from 500000.ckpt")
    assert torch.equal(checkpoint.net.pos_embed, tiny(seed=seed)["pos_embed"])
    import_official(folder / "nnet.pth", tmp_path / "ours.safetensors", None, TINY)
    assert load(tmp_path / "ours.safetensors").card.weights == "raw"


def test_the_folder_of_an_autoencoder_is_stored_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vae").mkdir()
    model = recognise(tiny(channels=4), ImportOptions(heads=2, vae="vae", alpha_min=0.7), HERE)
    assert model.latents.vae == str((tmp_path / "vae").resolve())
    with raises_user_error("./missing", "`vae`"):
        recognise(tiny(channels=4), ImportOptions(heads=2, vae="./missing", alpha_min=0.7), HERE)


def test_a_safetensors_file_is_exported_again(trained, tmp_path):
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    export_file(trained, first, "raw")
    export_file(first, second)
    assert read_description(second) == read_description(first)
    assert same(load_file(second), load_file(first))
    with raises_user_error("raw", "ema"):
        export_file(first, tmp_path / "official.pth", "ema")
    with raises_user_error("replace"):
        export_file(first, tmp_path / "." / "first.safetensors")
