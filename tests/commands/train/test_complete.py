"""Open values of a configuration: sizes of images and networks, and values for other data."""

import pytest
import yaml
from conftest import ROOT, print_config, train
from image_noise import tree
from jsonargparse import Namespace
from refusals import find_line

from uvit_decay.checkpoint import load
from uvit_decay.commands.train.complete import (
    leave_out_classes,
    name_data,
    prefer_minutes,
    reset_alpha_min,
    unclip_latents,
)
from uvit_decay.commands.train.words import list_given
from uvit_decay.data import Images, folder
from uvit_decay.data.named import open_data
from uvit_decay.decay import Connection

NAMES = [f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(4)]
FLAGS = ["--data.batch_size=4", "--data.channels=1", "--model.net.num_classes=2", "--trainer.max_steps=1"]
FLAGS += ["--model.net.dim=16", "--model.net.depth=2", "--trainer.callbacks=[]", "--trainer.limit_val_batches=0"]
NULLS = [f"--model.net.{name}=null" for name in ("image_size", "channels", "num_classes")]


@pytest.fixture
def images(tmp_path):
    tree(tmp_path / "images", NAMES)
    return ["--data=Images", f"--data.path={tmp_path / 'images'}", *FLAGS]


def stored_size(folder):
    (path,) = (folder / "runs").rglob("config.yaml")
    return yaml.safe_load(path.read_text())["data"]["init_args"]["image_size"]


def test_other_data_on_the_command_line_start_from_the_configuration_of_pictures(tmp_path, monkeypatch, caplog):
    """Neither a hold-out nor a batch is asked for: the batch is all pictures."""
    tree(tmp_path / "birds", NAMES)
    words = [f"--data.path={tmp_path / 'birds'}", *FLAGS[4:7], "--trainer.max_steps=1"]
    train(monkeypatch, tmp_path, "fit", *words, "--trainer.callbacks=LastCheckpoint")
    (last,) = (tmp_path / "runs" / "birds").rglob("last.ckpt")
    card = load(last).card
    assert card.net.class_path.endswith("SiT")
    assert [card.net.init_args[name] for name in ("image_size", "channels", "num_classes")] == [32, 3, 2]
    find_line(caplog.messages, "--data.batch_size 8", "64")


def test_a_configuration_that_names_the_network_alone_decides(images, tmp_path, monkeypatch):
    values = yaml.safe_load((ROOT / "configs" / "digits.yaml").read_text())
    values["data"] = {"class_path": "Images", "init_args": {"path": str(tmp_path / "images")}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(values))
    train(monkeypatch, tmp_path, "fit", f"--config={tmp_path / 'own.yaml'}", *images)
    assert stored_size(tmp_path) == 8
    arguments = {"path": str(tmp_path / "images"), "channels": 1, "batch_size": 4}
    data = {"class_path": "uvit_decay.data.Images", "init_args": arguments}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump({"data": data}))
    assert open_data(str(tmp_path / "data.yaml"), None, 16, 1).train.images.shape[-1] == 16


def test_a_run_goes_on_under_a_configuration_whose_sizes_are_null(images, tmp_path, monkeypatch):
    listed = []
    list_parts = folder.list_parts
    monkeypatch.setattr(folder, "list_parts", lambda *args: listed.append(args) or list_parts(*args))
    run = [*images, "--data.image_size=null", "--trainer.callbacks=LastCheckpoint", "--ckpt_path=auto"]
    numbers = ["--model.net.image_size=8", "--model.net.channels=1"]
    train(monkeypatch, tmp_path, "fit", *run, *numbers)
    train(monkeypatch, tmp_path, "fit", *run, *NULLS, "--trainer.max_steps=2")
    assert len(listed) == 2  # once by each launch
    assert stored_size(tmp_path) == 8
    (last,) = tmp_path.rglob("last.ckpt")
    card = load(last).card
    assert card.step == 2
    sizes = {"image_size": 8, "channels": 1, "num_classes": 2}
    assert card.net.init_args.items() >= sizes.items()


def test_pictures_without_classes_make_a_network_without_classes(tmp_path, monkeypatch, capsys):
    tree(tmp_path / "images", [f"{i}.png" for i in range(4)])
    words = ["--data=Images", f"--data.path={tmp_path / 'images'}", *FLAGS, *NULLS]
    words.append("--trainer.callbacks=LastCheckpoint")
    printed = yaml.safe_load(print_config(monkeypatch, capsys, tmp_path, "fit", *words))
    assert printed["model"]["init_args"]["net"]["init_args"]["num_classes"] is None
    train(monkeypatch, tmp_path, "fit", *words)
    (last,) = tmp_path.rglob("last.ckpt")
    assert load(last).card.net.init_args["num_classes"] == 0


@pytest.mark.parametrize(
    ("sides", "options", "size"),
    [
        ([48, 48], {}, 48),
        ([48, 48], {"image_size": 16}, 16),
        ([48, 40], {}, 32),
        ([1025, 1025], {}, 32),
    ],
)
def test_the_size_of_pictures_is_the_size_that_they_have_in_common(sides, options, size, tmp_path):
    for number, side in enumerate(sides):
        tree(tmp_path, [f"class/{number}.png"], size=side)
    data = Images(tmp_path, channels=1, batch_size=1, **options)
    assert data.find_sizes() == (size, 1, 1)
    data.setup()
    assert data.train.images.shape == (2, 1, size, size)


@pytest.mark.parametrize(
    ("data", "words", "clip"),
    [
        ("Latents", ["--config", "clip.yaml"], None),
        ("Digits", ["--config", "clip.yaml"], True),
        ("Latents", ["--model.sampling.clip", "true"], True),
        ("Latents", ["--model.init_args.sampling.clip=true"], True),
        ("Latents", ["--model.sampling", '{"clip":true}'], True),
    ],
)
def test_latents_are_clipped_only_where_the_command_line_asks(data, words, clip):
    model = Namespace(init_args=Namespace(sampling=Namespace(clip=True)))
    config = Namespace(model=model, data=Namespace(class_path=f"uvit_decay.data.{data}"))
    unclip_latents(config, list_given(words))
    assert config.model.init_args.sampling.clip is clip


@pytest.mark.parametrize(
    ("names", "words", "classes"),
    [
        (["cat", "dog"], ["--data.path=X"], None),
        (["cat", "n01440764"], ["--data.init_args.path", "X"], "imagenet-1k"),
        (["cat", "dog"], ["--data.path=X", "--data.classes", "imagenet-1k"], "imagenet-1k"),
        (["cat", "dog"], ["--data.path=X", "--config=own.yaml"], "imagenet-1k"),
        (["cat", "dog"], ["--data.holdout=0.1"], "imagenet-1k"),
    ],
)
def test_a_path_on_the_command_line_takes_the_class_list_of_a_configuration_away(names, words, classes, tmp_path):
    tree(tmp_path, [f"{name}/0.png" for name in names])
    arguments = Namespace(path=str(tmp_path), classes="imagenet-1k")
    config = Namespace(data=Namespace(class_path="uvit_decay.data.AugmentedImages", init_args=arguments))
    assert bool(leave_out_classes(config, list_given(words))) == (classes is None)
    assert arguments.classes == classes


def test_latents_of_own_pictures_take_the_class_list_of_a_configuration_away(encoded):
    arguments = Namespace(path=str(encoded), classes="imagenet-100/cmc")
    config = Namespace(data=Namespace(class_path="uvit_decay.data.Latents", init_args=arguments))
    leave_out_classes(config, {"data.path": str(encoded)})
    assert arguments.classes is None


@pytest.mark.parametrize(
    ("schedule", "words", "alpha_min"),
    [
        ("attnres", ["--model.net.schedule", "attnres"], 1.0),
        ("dar", ["--model.init_args.net.init_args.schedule=dar"], 1.0),
        ("rezero", ["--model.net.schedule", "rezero"], 1.0),
        ("gain", ["--model.net.schedule", "gain"], 0.7),
        ("attnres", ["--model.net.schedule", "attnres", "--model.net.alpha_min", "0.7"], 0.7),
        ("attnres", ["--config", "depth.yaml"], 0.7),
        (Connection, ["--model.net.schedule", "mine.Highway"], 1.0),
    ],
)
def test_a_schedule_without_alpha_min_on_the_command_line_takes_the_configurations_away(schedule, words, alpha_min):
    net = Namespace(init_args=Namespace(schedule=schedule, alpha_min=0.7))
    config = Namespace(model=Namespace(init_args=Namespace(net=net)))
    assert "<class" not in str(reset_alpha_min(config, list_given(words)))
    assert net.init_args.alpha_min == alpha_min


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model.net.dim", "16", "--data.init_args.path=x"], {"model.net.dim": "16", "data.path": "x"}),
        (["--data.path=x", "--config", "own.yaml", "--trainer.callbacks+=EMA"], {"trainer.callbacks": "EMA"}),
        (
            ["--model", "{class_path: A, init_args: {net: {init_args: {dim: 3}}}}"],
            {"model.class_path": "A", "model.net.dim": 3},
        ),
    ],
)
def test_what_a_command_line_gives_is_known_by_flag(words, expected):
    assert list_given(words) == expected


@pytest.mark.parametrize(
    ("words", "lengths"),
    [
        (["--minutes=5"], (-1, None)),
        (["--minutes", "5", "--trainer.max_epochs", "2"], (2000, 2)),
        (["--minutes", "5", "--trainer.max_steps", "2000"], (2000, None)),
        ([], (2000, 2)),
    ],
)
def test_minutes_of_the_command_line_replace_the_length_of_a_configuration(words, lengths):
    config = Namespace(trainer=Namespace(max_steps=2000, max_epochs=2))
    prefer_minutes(config, list_given(words))
    assert (config.trainer.max_steps, config.trainer.max_epochs) == lengths


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("birds", "birds"),
        ("birds/Train/", "birds"),
        ("birds/data/images", "birds"),
        ("birds.v2", "birds.v2"),
        ("birds/train.zip", "birds"),
        ("cifar10-train.zip", "cifar10-train"),
        ("/data", "images"),
        ("/pictures/birds/train/../..", "pictures"),
        (None, "images"),
    ],
)
def test_a_run_is_named_after_its_data(path, name):
    data = Namespace(class_path="uvit_decay.data.Images", init_args=Namespace(path=path))
    assert name_data(data) == name
