"""Folders that diffusers loads, from a disk or the Hub, and that are checkpoints: --ckpt, export, --model.init_from."""

import itertools
import pkgutil
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, same
from diffusers import DiffusionPipeline
from hub_folders import (
    BUNDLED,
    export,
    own_modules,  # noqa: F401
    sample_pixels,
    seed_generator,
    stack_pictures,
    write_denoiser,
    write_latent_sit,
)
from hub_server import hub
from jsonargparse._typehints import resolve_class_path_by_name
from official_files import read_description, redescribe
from refusals import raises_user_error
from safetensors.torch import load_file, save_file
from small_mae import small_mae
from test_full_disk import full_disk
from torch import nn

from uvit_decay.checkpoint import load
from uvit_decay.checkpoint.io import WEIGHTS
from uvit_decay.commands.convert import main
from uvit_decay.decay import SHORTCUTS
from uvit_decay.diffusion.noise_path import VP, DDPMLinear
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.hub.folder import UNFINISHED, build_pipeline
from uvit_decay.latents.autoencoder import Autoencoder
from uvit_decay.nn import SiT, UViT
from uvit_decay.nn.long_skips import SKIP_SCALES
from uvit_decay.tasks.init_from import read_weights


def opened(folder):
    pipeline = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Return the bundled checkpoint, exported."""
    return export(BUNDLED, tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def latent_sit(vae, tmp_path_factory):
    return write_latent_sit(tmp_path_factory.mktemp("sit") / "sit.safetensors", vae)


def test_the_command_writes_what_diffusers_loads(tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    main(["export", str(BUNDLED), str(folder), "--to", "diffusers"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"wrote {folder}"
    scope = {}
    exec("\n".join(lines[1:-1]), scope)  # the lines that the command prints
    assert stack_pictures([scope["image"]]).shape == (1, 8, 8, 1)


def test_the_lines_in_the_documentation_run(digits, tmp_path, monkeypatch):
    text = (ROOT / "docs" / "checkpoints.md").read_text()
    (block,) = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("digits").symlink_to(digits)
    scope = {}
    exec(block, scope)
    assert (
        stack_pictures(scope["images"]) == sample_pixels(BUNDLED, range(2), classes=("3", "4"), guidance=2.0, steps=25)
    ).all()
    assert scope["latents"].shape == (1, 1, 8, 8)


@pytest.mark.parametrize("guidance", [None, 1.0])
def test_pictures_are_those_of_sample(digits, guidance):
    labels = [i % 10 for i in range(20)]
    pictures = opened(digits)(class_labels=labels, generator=seed_generator(5), guidance_scale=guidance).images
    assert (stack_pictures(pictures) == sample_pixels(BUNDLED, range(20), seed=5, guidance=guidance)).all()


def test_a_folder_of_latents_has_the_autoencoder(latent_sit, vae, tmp_path):
    folder = export(latent_sit, tmp_path / "folder")
    pipeline = opened(folder)
    pictures = stack_pictures(pipeline(class_labels=["cat", "domestic dog", 0], generator=seed_generator(2)).images)
    assert pictures.shape == (3, 32, 32, 3)
    for file in (latent_sit, folder):
        assert (pictures == sample_pixels(file, range(3), labels="balanced", seed=2)).all()
    assert load(folder).card.latents.vae == str(folder / "vae")
    for path in (*folder.rglob("*.json"), folder / WEIGHTS):  # no path of this machine
        assert str(vae).encode() not in path.read_bytes()


def test_a_folder_is_the_checkpoint_that_it_came_from(digits, tmp_path):
    ours, theirs = load(digits), load(BUNDLED)
    assert (ours.card, ours.path) == (theirs.card, theirs.path)
    assert same(ours.net.state_dict(), theirs.net.state_dict())
    assert (sample_pixels(digits, range(4)) == sample_pixels(BUNDLED, range(4))).all()
    assert read_weights(digits).card == theirs.card
    main(["export", str(digits), str(tmp_path / "again.safetensors")])
    assert load(tmp_path / "again.safetensors").card == theirs.card


def test_a_folder_that_is_no_checkpoint_is_refused(digits, tmp_path):
    with raises_user_error("ema", "raw"):
        load(digits, "raw")
    (tmp_path / "denoiser").mkdir()
    (tmp_path / "model_index.json").write_text("{}")
    save_file(load_file(digits / WEIGHTS), tmp_path / WEIGHTS)
    with raises_user_error("exported"):
        load(tmp_path)


def test_a_folder_comes_back_from_the_hub_as_the_same_pipeline(digits, tmp_path, monkeypatch):
    with hub(digits, monkeypatch):
        pipeline = DiffusionPipeline.from_pretrained("me/digits", trust_remote_code=True, cache_dir=tmp_path / "cache")
    assert type(pipeline).__module__.startswith("diffusers_modules")
    pictures = stack_pictures(pipeline(class_labels=[0, 1, 2], generator=seed_generator(0)).images)
    assert (pictures == sample_pixels(BUNDLED, range(3), seed=0)).all()


def test_another_folder_of_the_autoencoder_can_be_named(latent_sit, vae, tmp_path):
    moved = shutil.copytree(vae, tmp_path / "moved")
    gone = shutil.copy(latent_sit, tmp_path)
    redescribe(gone, latents=read_description(gone)["latents"] | {"vae": str(tmp_path / "gone")})
    with raises_user_error("`vae`"):
        export(gone, tmp_path / "folder")
    export(gone, tmp_path / "folder", vae=str(moved))
    assert opened(tmp_path / "folder").vae.config.latent_channels == 4


def each_of_the_tables():
    """Options of networks: every kind of shortcut and attention over depth, with every factor of the long skips."""
    yield {"output_skip": "learned"}
    others = itertools.cycle((0.5, *(scale for scale in SKIP_SCALES if scale != "stream")))
    scales = {"gain": "stream", "constant-branch": "stream:0.8"}
    for name, kind in SHORTCUTS.items():
        falls = kind.falls
        yield {"schedule": name, "alpha_min": 0.7 if falls else 1.0, "skip_scale": scales.get(name) or next(others)}


def test_unconditional_networks_of_every_kind(tmp_path):
    for i, options in enumerate(each_of_the_tables()):
        net = UViT(8, 2, 1, dim=16, depth=2, heads=2, **options)
        file = write_denoiser(tmp_path / f"{i}.safetensors", net, VP(0.2, 15.0), "x", Sampling("euler", 2))
        pipeline = opened(export(file, tmp_path / f"{i}"))
        pictures = stack_pictures(pipeline(num_images=2, generator=seed_generator(1)).images)
        assert (pictures == sample_pixels(file, range(2), seed=1)).all(), options
    with pytest.raises(ValueError, match="unconditional"):
        pipeline(class_labels=[0])


@pytest.mark.parametrize("entry", ["linear", "hyper-2"])
def test_a_schedule_that_a_module_has_added_is_refused(entry, tmp_path, monkeypatch):
    monkeypatch.setattr("uvit_decay.hub.folder.BUILT_IN", tuple(name for name in SHORTCUTS if name != entry))
    net = UViT(8, 2, 1, dim=16, depth=2, heads=2, schedule=entry)
    file = write_denoiser(tmp_path / "a.safetensors", net, VP(), "x", Sampling("euler", 2))
    with raises_user_error(entry, ".safetensors"):
        export(file, tmp_path / "folder")


def test_classes_have_names_and_wordnet_ids_words(latent_sit, tmp_path):
    loaded = load(latent_sit)
    named = replace(loaded.card, class_names=("n02979186", "dog, Domestic dog, cassette player"))
    pipeline = build_pipeline(replace(loaded, card=named), Autoencoder(named.latents.vae))
    assert pipeline.config.id2label["0"] == "cassette player, n02979186"
    assert [pipeline._find_class(name) for name in ("N02979186", "domestic dog")] == [0, 1]
    with pytest.raises(ValueError, match=r"'cassette player'.*\[0, 1\]"):
        pipeline("cassette player")


def test_a_configuration_still_means_our_network_and_not_the_class_of_a_loaded_folder(digits):
    opened(digits)
    assert pkgutil.resolve_name(resolve_class_path_by_name(nn.Module, "UViT")) is UViT


def test_a_folder_that_holds_anything_is_refused_and_left_alone(tmp_path):
    (tmp_path / ".git").mkdir()
    with raises_user_error(tmp_path, ".git"):
        export(BUNDLED, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".git"]


def test_what_a_killed_export_has_prepared_is_replaced(digits, tmp_path):
    (tmp_path / UNFINISHED / "denoiser").mkdir(parents=True)
    (tmp_path / UNFINISHED / "other.py").touch()
    export(BUNDLED, tmp_path)
    names = [path.relative_to(digits) for path in digits.rglob("*")]
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == sorted(names)


def test_a_full_disk_leaves_an_empty_folder(tmp_path):
    with full_disk(100_000), raises_user_error(tmp_path):
        export(BUNDLED, tmp_path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda state: state.pop("net.mid_block.norm1.weight"), "missing keys net.mid_block.norm1.weight"),
        (lambda state: state["net.alphas"].mul_(0.9), "alphas"),
    ],
)
def test_weights_that_do_not_fit_are_refused(digits, tmp_path, change, problem):
    folder = shutil.copytree(digits, tmp_path / "folder")
    state = load_file(folder / WEIGHTS)
    change(state)
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    with pytest.raises(Exception, match=problem):  # the UserError of the folder's own code
        opened(folder)


def test_what_cannot_be_exported_is_one_line(tmp_path):
    encoder = write_denoiser(tmp_path / "mae.safetensors", small_mae())
    for file, target, options, message in (
        (encoder, tmp_path / "folder", {}, "images"),
        (BUNDLED, tmp_path / "folder", {"vae": "x"}, "pixels"),
    ):
        with raises_user_error(message):
            export(file, target, **options)


def test_a_dit_keeps_its_variance_and_its_sampler(tmp_path):
    sizes = dict(dim=16, depth=2, heads=2, num_classes=2, learn_sigma=True, time="dit", learned_variance=True)
    sizes |= dict(output_skip="learned")
    sampling = Sampling("dit-ddpm", 6, 2.0, guidance_channels=1)
    net, file = SiT(8, 2, 3, **sizes), tmp_path / "dit.safetensors"
    write_denoiser(file, net, DDPMLinear(), "eps", sampling, ("a", "b"))
    folder = export(file, tmp_path / "folder")
    pictures = stack_pictures(opened(folder)(class_labels=[0, 1, 0], generator=seed_generator(4)).images)
    assert (pictures == sample_pixels(file, range(3), seed=4, labels="balanced")).all()
    assert pictures.std() > 10


def test_an_export_says_that_its_autoencoder_is_a_folder_of_this_machine(latent_sit, vae, tmp_path, capsys):
    main(["export", str(latent_sit), str(tmp_path / "file.safetensors")])
    assert f"{vae}: elsewhere name one with --vae" in capsys.readouterr().out
    redescribe(tmp_path / "file.safetensors", latents=read_description(latent_sit)["latents"] | {"vae": "me/vae"})
    main(["export", str(tmp_path / "file.safetensors"), str(tmp_path / "again.safetensors")])
    assert "--vae" not in capsys.readouterr().out
