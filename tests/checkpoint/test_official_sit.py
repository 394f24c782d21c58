"""SiT files of the official code and of the decay's authors: recognised, imported as the same function, exported."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch
from conftest import same
from official_files import (
    HERE,
    import_and_load,
    is_close,
    meta,
    our_sit,
    plain_head,
    save_contents,
    tiny_sit,
)
from sit_reference import SMALL, VARIANTS, inputs, official_forward, official_shapes

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.convert import export_file, import_official, recognise
from uvit_decay.checkpoint.official.sit import HEAD
from uvit_decay.checkpoint.options import ImportOptions
from uvit_decay.commands.convert import main
from uvit_decay.diffusion.noise_path import GVP, VP, Linear
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.files.instantiate import Spec
from uvit_decay.nn.sizes import SIT_SIZES

PLAIN = ImportOptions(heads=2)
ARGUMENTS = Namespace(model="SiT-XL/2", path_type="Linear", prediction="velocity", vae="ema", cfg_scale=4.0, ckpt=None)
FILES = VARIANTS | {"patch-4-sigma": VARIANTS["patch-4"] | dict(learn_sigma=True)}
PUBLISHED = [
    # size, options of the file, tensors, parameters of the plain network
    ("sit-s/2", dict(), 124 + 8, 32_957_200),
    ("sit-xl/2", dict(learn_sigma=True), 292, 675_111_184),
    ("sit-xl/2", dict(learn_sigma=True, wiring="decayed"), 320, 693_706_768),
    ("sit-xl/4", dict(learn_sigma=False), 292, 675_000_640),
]


def expected(state, options, **forward):
    """Return the published function at our inputs, whose time runs the other way."""
    x, t, y = inputs(**SMALL | options)
    return official_forward(state, x, 1 - t, y, **SMALL | options, **forward)


def output(checkpoint, options):
    with torch.no_grad():
        return checkpoint.net(*inputs(**SMALL | options))


def training(**entries):
    """Return a training checkpoint as the published code saves it: `pos_embed` has no optimizer state."""
    optimizer = {"state": {0: {"step": torch.tensor(7.0), "exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 1e-4}]}
    parts = {"model": tiny_sit(seed=2), "ema": tiny_sit(seed=1), "opt": optimizer, "args": ARGUMENTS}
    return parts | entries


@pytest.mark.parametrize(("name", "options", "tensors", "count"), PUBLISHED)
def test_published_files_are_recognised(name, options, tensors, count):
    size, patch = name.split("/")
    layout = SIT_SIZES[size] | dict(image_size=32, channels=4, patch_size=int(patch), num_classes=1000) | options
    state = meta(official_shapes(**layout))
    # The values of the head are looked at, of other tensors only the shapes.
    state |= {name: torch.zeros_like(state[name], device="cpu") for name in HEAD}
    model = recognise(state, ImportOptions(alpha_min=1.0), HERE)
    card = model.card("file.pt")
    assert (model.size, len(state)) == (size, tensors)
    assert (model.net.num_classes, model.net.null_label, model.net.config["learn_sigma"]) == (1000, True, False)
    assert model.net.config.items() >= {**layout, "learn_sigma": False}.items()
    assert f"{name} ({layout['heads']} heads, {count:,} parameters), velocity of latents" in model.summary()
    assert card.path == Spec("uvit_decay.diffusion.noise_path.Linear", {})
    assert (card.prediction, card.latents.scale) == ("velocity", 0.18215)
    assert card.latents.vae == "stabilityai/sd-vae-ft-ema"
    assert card.sampling == Sampling("sit-sde", 250, 1.0, False)


@pytest.mark.parametrize("options", FILES.values(), ids=FILES)
def test_an_imported_file_is_the_published_function_and_goes_back(tmp_path, options):
    state, plain_labels = tiny_sit(**options), not options.get("null_label", True)
    hints = ImportOptions(heads=2, alpha_min=1.0, num_classes=3 if plain_labels else None)
    checkpoint = import_and_load(state, tmp_path, hints)
    assert is_close(output(checkpoint, options), expected(state, options))
    card = checkpoint.card
    assert (card.prediction, checkpoint.path, card.step, card.weights) == ("velocity", Linear(), 0, "ema")
    export_file(tmp_path / "ours.safetensors", tmp_path / "back.pt")
    assert same(torch.load(tmp_path / "back.pt", weights_only=True), plain_head(state))


@pytest.mark.parametrize(("weights", "seed"), [(None, 1), ("ema", 1), ("raw", 2)])
def test_a_training_file_gives_its_step_and_either_weights(tmp_path, weights, seed):
    path = save_contents(training(), tmp_path / "0400000.pt")
    import_official(path, tmp_path / "ours.safetensors", weights, PLAIN)
    checkpoint = load(tmp_path / "ours.safetensors")
    card = checkpoint.card
    assert (card.step, card.weights, card.data) == (400_000, weights or "ema", "unknown, imported from 0400000.pt")
    assert torch.equal(checkpoint.net.pos_embed, tiny_sit(seed=seed)["pos_embed"])
    import_official(save_contents(training(), tmp_path / "renamed.pt"), tmp_path / "ours.safetensors", weights, PLAIN)
    assert load(tmp_path / "ours.safetensors").card.step == 0


@pytest.mark.parametrize("kind", [Namespace, dict])
def test_the_arguments_of_a_training_run_are_used_where_the_caller_is_silent(tmp_path, kind):
    arguments = kind(path_type="VP", prediction="noise", min_sigma=0.6)
    contents = training(ema=tiny_sit(wiring="decayed"), args=arguments)
    checkpoint = import_and_load(contents, tmp_path, PLAIN)
    assert (checkpoint.path, checkpoint.card.prediction, checkpoint.net.config["alpha_min"]) == (VP(), "eps", 0.6)
    checkpoint = import_and_load(
        contents, tmp_path, ImportOptions(heads=2, path="gvp", prediction="score", alpha_min=0.6)
    )
    assert (checkpoint.path, checkpoint.card.prediction) == (GVP(), "score")


@pytest.mark.parametrize("options", [*VARIANTS.values(), dict(alpha_min=0.8)], ids=[*VARIANTS, "decay"])
def test_ours_to_official_to_ours_is_equal(tmp_path, options):
    options = {"alpha_min": 0.7, **options}
    ours, official, back = (tmp_path / name for name in ("ours.safetensors", "bare.pt", "back.safetensors"))
    net = load(our_sit(tmp_path, **options)).net
    export_file(ours, official)
    assert set(torch.load(official, weights_only=True)) == set(official_shapes(**SMALL | options))
    classes = net.num_classes if net.num_classes else None
    import_official(official, back, None, ImportOptions(heads=2, alpha_min=options["alpha_min"], num_classes=classes))
    again = load(back).net
    assert same(again.state_dict(), plain_head(net.state_dict()))
    assert again.config == net.config | {"learn_sigma": False}


def test_the_command_line_imports_and_exports(tmp_path, capsys):
    official, ours, back = (str(tmp_path / name) for name in ("0000050.pt", "ours.safetensors", "back.pt"))
    decayed = tiny_sit(wiring="decayed", learn_sigma=True)
    torch.save(training(model=decayed), official)
    hints = "--weights raw --heads 2 --num-classes 4 --alpha-min 0.8 --path gvp --prediction score --vae my/vae"
    main(["import", official, ours, *hints.split()])
    recognised, wrote = capsys.readouterr().out.splitlines()
    assert recognised.startswith("recognised sit/2 (2 heads, ")
    for part in (
        "score of latents, path gvp",
        "num_classes 4",
        "alpha_min 0.8",
        "wiring decayed",
        ", raw weights from its entry model,",
    ):
        assert part in recognised
    assert recognised.endswith("of step 50")
    assert wrote == f"wrote {ours}"
    checkpoint = load(Path(ours))
    card = checkpoint.card
    assert (card.weights, checkpoint.path, card.prediction, card.step) == ("raw", GVP(), "score", 50)
    main(["export", ours, back])
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {back}"
    assert same(torch.load(back, weights_only=True), plain_head(decayed))
