"""Open values of a configuration: sizes of images and networks, and values for other data."""

import pytest
import yaml
from conftest import ROOT, refused, tiny_trainer, train
from image_noise import tree
from jsonargparse import Namespace
from refusals import find_line

from uvit_decay.checkpoint import load
from uvit_decay.commands.train.complete import leave_out_other_data, reset_alpha_min, unclip_latents
from uvit_decay.data import AugmentedImages, Images, folder
from uvit_decay.data.named import open_data

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


@pytest.mark.parametrize(("side", "size"), [(8, 8), (12, 12), (66, 32)])
def test_the_default_network_has_the_sizes_of_the_data_that_the_command_line_names(
    side, size, tmp_path, monkeypatch, caplog
):
    """Neither a hold-out nor a batch is asked for: probes are left out, and the batch is all pictures."""
    tree(tmp_path / "images", NAMES, size=side)
    words = ["--data=Images", f"--data.path={tmp_path / 'images'}", *FLAGS[4:6], "--trainer.max_steps=1"]
    train(monkeypatch, tmp_path, "fit", *words, "--model.sampling.steps=2")
    (last,) = tmp_path.rglob("last.ckpt")
    arguments = load(last).card.net.init_args
    assert [arguments[name] for name in ("image_size", "channels", "num_classes")] == [size, 3, 2]
    find_line(caplog.messages, "--data.batch_size 8", "32")
    find_line(caplog.messages, "LinearProbes are left out", "--data.holdout")
    find_line(caplog.messages, "GenerationMetrics are left out", "8 training images")


def test_images_take_the_size_that_is_set_for_the_network(images, tmp_path, monkeypatch):
    train(monkeypatch, tmp_path, "fit", *images, "--model.net.image_size=16")
    assert stored_size(tmp_path) == 16


def test_two_sizes_that_are_set_are_not_overruled(images, tmp_path, monkeypatch, capsys):
    line = refused(
        capsys, train, monkeypatch, tmp_path, "fit", *images, "--data.image_size=32", "--model.net.image_size=16"
    )
    assert "--model.net.image_size 32 (or --data.image_size 16)" in line


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


@pytest.mark.parametrize(("kind", "size"), [(Images, 32), (AugmentedImages, 224)])
def test_in_python_the_sizes_are_those_they_were(kind, size):
    assert (kind("images").image_size, kind("images", image_size=64).image_size) == (size, 64)


def test_a_run_goes_on_under_a_configuration_whose_sizes_are_null(images, tmp_path, monkeypatch):
    listed = []
    list_images = folder.list_images
    monkeypatch.setattr(folder, "list_images", lambda *args: listed.append(args) or list_images(*args))
    run = [*images, "--trainer.callbacks=LastCheckpoint", "--ckpt_path=auto"]
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


def test_pictures_without_classes_make_a_network_without_classes(tmp_path, monkeypatch, capsys, caplog):
    tree(tmp_path / "images", [f"{i}.png" for i in range(4)])
    words = [
        "--data=Images",
        f"--data.path={tmp_path / 'images'}",
        *FLAGS,
        "--trainer.callbacks=LastCheckpoint",
        *NULLS,
    ]
    with pytest.raises(SystemExit):
        train(monkeypatch, tmp_path, "fit", *words, "--print_config")
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["model"]["init_args"]["net"]["init_args"]["num_classes"] is None
    train(monkeypatch, tmp_path, "fit", *words)
    (last,) = tmp_path.rglob("last.ckpt")
    assert load(last).card.net.init_args["num_classes"] == 0
    find_line(caplog.messages, "no classes", "label_dropout", "sampling.guidance")


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
    unclip_latents(config, words)
    assert config.model.init_args.sampling.clip is clip


@pytest.mark.parametrize(("size", "said"), [(16, True), (12, False)])
def test_enlarged_images_are_remarked_on_in_training(size, said, tmp_path, caplog):
    tree(tmp_path, NAMES, size=8)
    data = Images(tmp_path, channels=1, batch_size=1, image_size=size)
    data.trainer = tiny_trainer(tmp_path)
    data.load()
    assert any("--data.image_size 8" in line for line in caplog.messages) == said


@pytest.mark.parametrize(
    ("class_names", "words", "test_path", "classes"),
    [
        (["cat", "dog"], ["--data.path=X"], None, None),
        (["cat", "n01440764"], ["--data.init_args.path", "X"], None, "imagenet-1k"),
        (
            ["cat", "dog"],
            ["--data.path=X", "--data.test_path=test", "--data.classes", "imagenet-1k"],
            "test",
            "imagenet-1k",
        ),
        (["cat", "dog"], ["--data.path=X", "--config=own.yaml"], "test", "imagenet-1k"),
        (["cat", "dog"], ["--data.holdout=0.1"], "test", "imagenet-1k"),
    ],
)
def test_a_path_on_the_command_line_takes_the_other_data_of_a_configuration_away(
    class_names, words, test_path, classes, tmp_path, caplog
):
    tree(tmp_path, [f"{name}/0.png" for name in class_names])
    arguments = Namespace(path=str(tmp_path), test_path="test", classes="imagenet-1k")
    config = Namespace(data=Namespace(class_path="uvit_decay.data.AugmentedImages", init_args=arguments))
    leave_out_other_data(config, words)
    assert (arguments.test_path, arguments.classes) == (test_path, classes)
    said = [line for line in caplog.messages if "--data.test_path" in line]
    assert len(said) == (test_path is None)


def test_latents_of_own_pictures_take_the_class_list_of_a_configuration_away(encoded):
    arguments = Namespace(path=str(encoded), test_path=None, classes="imagenet-100/cmc")
    config = Namespace(data=Namespace(class_path="uvit_decay.data.Latents", init_args=arguments))
    leave_out_other_data(config, ["--config=c.yaml", "--data.path", str(encoded)])
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
    ],
)
def test_a_schedule_without_alpha_min_on_the_command_line_takes_the_configurations_away(schedule, words, alpha_min):
    net = Namespace(init_args=Namespace(schedule=schedule, alpha_min=0.7))
    config = Namespace(model=Namespace(init_args=Namespace(net=net)))
    reset_alpha_min(config, words)
    assert net.init_args.alpha_min == alpha_min
