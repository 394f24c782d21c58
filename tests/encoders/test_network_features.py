"""Classifiers and encoders as extractors: their own features, their classes, and the values of real images beside."""

import json

import pytest
import timm
import torch
from conftest import ROOT, tiny_trainer, trained_once
from evaluations import digit_images, evaluate, refused
from refusals import find_line
from runs import fit
from safetensors.torch import save_file
from small_mae import small_mae
from small_vit import small_vit

from uvit_decay import checkpoint
from uvit_decay.callbacks import GenerationMetrics, LastCheckpoint
from uvit_decay.checkpoint import export_file
from uvit_decay.data import Digits
from uvit_decay.encoders.network_features import CheckpointFeatures, NetworkFeatures
from uvit_decay.nn import ResNet
from uvit_decay.pictures import save_npz, to_float
from uvit_decay.runs import history
from uvit_decay.tasks import ClassifyTask
from uvit_decay.tasks.optim.options import Optimization

REFERENCE = ["--reference", "digits:train"]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """Return a small ResNet that has seen some digits."""
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    net = ResNet(8, 1, width=2, depth=7, num_classes=10, stem="cifar", pixels="unit")
    task = ClassifyTask(net, optim=Optimization(3e-3, warmup_steps=5))
    tiny_trainer(folder, LastCheckpoint(), max_steps=60).fit(task, Digits(32))
    return folder / "checkpoints" / "last.ckpt"


def report(folder):
    return json.loads((folder / "report.json").read_text())


def test_test_images_are_as_good_as_the_real_images_beside_them(classifier, digits, tmp_path, monkeypatch, capsys):
    evaluate(monkeypatch, tmp_path, "generation", "--samples", "digits:test", *REFERENCE, "--features", classifier,
             "--metrics", "fd,prc", "--out", "report.json")  # fmt: skip
    found = report(tmp_path)
    assert set(found["values"]) == {"fd", "precision", "recall", "label_consistency"}
    assert found["ceiling"]["values"] == found["values"]
    assert all(0.1 < share <= 1 for share in found["coverage"].values())
    assert len(found["coverage"]) == 10
    images, labels = digits.test[list(range(len(digits.test)))]
    net = checkpoint.load(classifier).net
    with torch.no_grad():
        accuracy = float((net(to_float(images)).argmax(1) == labels).double().mean())
    assert found["values"]["label_consistency"] == pytest.approx(accuracy, abs=0.003)
    assert accuracy > 0.3
    extractor = found["protocol"]["extractor"]
    assert f"fd/digits-test-360_vs_digits-train-1437_{extractor}" in found["metrics"]
    assert found["ceiling"]["metrics"].keys() == found["metrics"].keys()
    assert found["protocol"]["features"]["network"] == "ResNet"
    assert "8x8x1" in found["protocol"]["features"]["input"]
    find_line(capsys.readouterr().out, "label_consistency", "real images")
    export_file(classifier, tmp_path / "classifier.safetensors")
    exported = NetworkFeatures(str(tmp_path / "classifier.safetensors"))
    assert exported.name.endswith(extractor.rpartition("-")[2])
    assert exported.name.startswith("classifier-")


@pytest.mark.parametrize(("features", "reference"), [("CLASSIFIER", None), ("small-cnn", "labelled.npz")])
def test_numbers_of_training_are_computed_again(classifier, features, reference, tmp_path, monkeypatch):
    """In the same features, which training names like the command, on any labelled reference."""
    trained_once(monkeypatch)
    name = str(classifier) if features == "CLASSIFIER" else features
    images = [] if reference is None else ["--reference", reference]
    if reference:
        save_npz(tmp_path / reference, [digit_images(90)], 90, [i % 3 for i in range(90)])
        reference = str(tmp_path / reference)
    metrics = GenerationMetrics(name, num=40, reference=reference, metrics=["fd"], allow_few=True)
    fit(tmp_path, LastCheckpoint(), metrics, max_steps=3)
    (line,) = history.read(tmp_path / "generation.jsonl")
    evaluate(monkeypatch, tmp_path, "generation", "--ckpt", "checkpoints/last.ckpt", *(images or REFERENCE), "--num",
             40, "--features", name, "--seed", 1, "--metrics", "fd", "--allow-few", "--out", "report.json")  # fmt: skip
    found = report(tmp_path)
    assert found["protocol"]["extractor"] == line.metadata["extractor"]
    assert found["values"] == line.values
    consistency = set() if reference else {"label_consistency"}  # three classes are not ten
    known = {"classifier_accuracy"} if features == "small-cnn" else set()
    assert set(line.values) == {"fd"} | consistency | known
    if reference is None:
        assert set(found["ceiling"]["values"]) == {"fd", "label_consistency"}
        assert found["ceiling"]["values"] == line.metadata["ceiling"]["values"]


@pytest.mark.parametrize(("channels", "features"), [(3, "small-cnn"), (1, "timm:test_vit=own.safetensors")])
def test_grey_and_colour_are_evaluated_without_a_download(channels, features, tmp_path, monkeypatch):
    save_file(timm.create_model("test_vit").state_dict(), tmp_path / "own.safetensors")
    images = digit_images(80).expand(-1, channels, -1, -1).contiguous()
    save_npz(tmp_path / "samples.npz", [images[:40]], 40, [i % 2 for i in range(40)])
    save_npz(tmp_path / "real.npz", [images[40:]], 40, [i % 2 for i in range(40)])
    evaluate(monkeypatch, tmp_path, "generation", "--samples", "samples.npz", "--reference", "real.npz", "--features",
             features, "--metrics", "fd", "--allow-few", "--max-reference", 30, "--out", "report.json")  # fmt: skip
    found = report(tmp_path)
    assert found["values"]["fd"] > 0
    assert ("classifier_accuracy" in found["values"]) == (features == "small-cnn")
    assert found["protocol"]["reference"]["n"] == 30


def test_other_classes_have_no_consistency(classifier, tmp_path, monkeypatch, capsys):
    save_npz(tmp_path / "samples.npz", [digit_images(40)], 40, [i % 12 for i in range(40)])
    evaluate(monkeypatch, tmp_path, "generation", "--samples", "samples.npz", *REFERENCE, "--features", classifier,
             "--metrics", "fd", "--ceiling", "digits:test", "--out", "report.json")  # fmt: skip
    assert set(report(tmp_path)["values"]) == {"fd"}
    assert set(report(tmp_path)["ceiling"]["values"]) == {"fd", "label_consistency"}
    assert any("digits-test-40_" in name for name in report(tmp_path)["ceiling"]["metrics"])  # as many as samples
    find_line(capsys.readouterr().err, "remark", "label_consistency", "12", "10")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--features", "best"], ("--features", "small-cnn", "timm:NAME=FILE", "best")),
        (["--features", ROOT / "checkpoints" / "digits.safetensors"], ("digits.safetensors", "UViT", "classifier")),
        (["--features", "CLASSIFIER", "--feature-precision", "bf16"], ("--feature-precision", "float32")),
        (["--features", "CLASSIFIER", "--num", "9"], ("9", "fd", "17")),
        (["--features", "small-cnn", "--reference", "unlabelled.npz"], ("small-cnn", "unlabelled.npz", "classes")),
        (["--features", "CLASSIFIER", "--metrics", "fd", "--ceiling", "few.npz"], ("few", "9", "fd")),
    ],
)
def test_what_has_no_features_is_one_line(classifier, options, message, tmp_path, monkeypatch, capsys):
    for name, count in (("few", 9), ("unlabelled", 40)):
        save_npz(tmp_path / f"{name}.npz", [digit_images(count)], count)
    options = [classifier if option == "CLASSIFIER" else option for option in options]
    samples = "digits:test"
    if "--num" in options:
        options, samples = options[:2], "few.npz"
    line = refused(monkeypatch, tmp_path, capsys, "generation", "--samples", samples, *REFERENCE, *options)
    find_line(line, message)


@pytest.mark.parametrize("net", [small_mae(), small_vit(pool="mean"), small_vit(norm=True, num_classes=0)])
def test_encoders_have_the_features_of_their_classifier(net):
    x = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    features, logits = CheckpointFeatures(net.eval())(x)
    if net.num_classes == 0:
        assert logits is None
    else:
        torch.testing.assert_close(logits, net(x))
    *_, tokens = net.forward_intermediates(x)
    expected = {"MAE": tokens[:, 1:].mean(1)}.get(type(net).__name__)
    torch.testing.assert_close(features, net.pooled(x) if expected is None else expected)
    assert features.shape == (3, net.dim)


@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_a_model_of_timm_has_timms_features_and_preprocessing(name, tmp_path):
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    save_file(model.state_dict(), tmp_path / "own.safetensors")
    extractor = NetworkFeatures(f"timm:{name}={tmp_path / 'own.safetensors'}")
    images = torch.randint(256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    config = timm.data.resolve_model_data_config(model)
    size = config["input_size"][1:]
    resized = torch.nn.functional.interpolate(
        images.float() / 255, size=size, mode=config["interpolation"], antialias=True
    ).clamp(0, 1)
    mean, std = (torch.tensor(config[key])[:, None, None] for key in ("mean", "std"))
    with torch.no_grad():
        expected = model.forward_head(model.forward_features((resized - mean) / std), pre_logits=True)
    found = extractor(images)
    torch.testing.assert_close(found.features, expected, atol=1e-4, rtol=1e-4)
    assert found.logits is None
    assert extractor.widths == {"features": expected.shape[1]}
    assert extractor.name.startswith(f"{name}-own-")
    assert all(str(part) in extractor.describe()["features"]["input"] for part in (size[0], config["interpolation"]))


def test_statistics_of_one_name_give_reports_of_two_names(classifier, tmp_path, monkeypatch, capsys):
    features = ["--features", classifier]
    for split in ("train", "test"):
        evaluate(monkeypatch, tmp_path, "statistics", f"digits:{split}", *features, "--out", f"{split}/real.npz")
    samples = ["--samples", "digits:test", "--metrics", "fd"]
    for split in ("train", "test"):
        evaluate(monkeypatch, tmp_path, "generation", *samples, "--reference", f"{split}/real.npz", *features)
    assert len(list(tmp_path.glob("*.json"))) == 2
    few = ["--reference", "test/real.npz", "--max-reference", 9]
    find_line(refused(monkeypatch, tmp_path, capsys, "generation", *samples, *few, *features), "--max-reference")
