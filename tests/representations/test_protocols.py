"""Protocols of frozen features against independent loops and scikit-learn, and end to end on real small images."""

import json
import statistics
from dataclasses import replace

import pytest
import torch
from conftest import tiny_net
from evaluations import evaluate, refused
from refusals import find_line, raises_user_error
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from uvit_decay.commands.features import ProbedOptions
from uvit_decay.diffusion.noise_path import VP
from uvit_decay.encoders.networks import ProbedNetwork
from uvit_decay.representations import probe_protocols
from uvit_decay.representations.classification import Classifying
from uvit_decay.representations.linear_probes import IN100, accuracies
from uvit_decay.representations.probe_options import Classification
from uvit_decay.representations.probe_protocols import PROTOCOLS, Cells, PointProtocol, draw_shots
from uvit_decay.representations.probing import choose_images, open_probed_data
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.random import normal

CPU = torch.device("cpu")
SINGLE = [name for name, protocol in PROTOCOLS.items() if isinstance(protocol, PointProtocol)]


@pytest.fixture(scope="module")
def pixels(digits):
    """Return the digits' pixels as features."""
    train, test = (images.images.flatten(1).float() / 255 for images in (digits.train, digits.test))
    return cells(train, digits.train.labels, test, digits.test.labels)


def cells(train, labels, test, test_labels):
    """Return features of one layer."""
    return Cells(lambda _: train[None], labels, test[None], test_labels, 10, CPU)


def outcome_of(protocol, cells, **options):
    """Return the scores and the chosen values."""
    outcome = PROTOCOLS[protocol].evaluate(cells, Classification(protocol=(protocol,), **options))
    assert tuple(outcome.values) == PROTOCOLS[protocol].scores
    return {name: float(value[0]) for name, value in outcome.values.items()}, outcome.chosen


def test_the_linear_probe_has_the_accuracy_of_its_last_pass_and_the_best_on_test(pixels, monkeypatch):
    monkeypatch.setattr(probe_protocols, "IN100", replace(IN100, batch_size=500))
    passes = replace(IN100, epochs=7, batch_size=500, seed=3).passes(pixels.train, pixels.labels, 10, CPU)
    each = [float(accuracies(models, pixels.test, pixels.test_labels, CPU)) for models in passes]
    values, chosen = outcome_of("in100-linear", pixels, epochs=7, seed=3)
    assert values == {"last": each[-1], "best_on_test": max(each)}
    assert (chosen["epochs"], chosen["batch"]) == (7, 500)
    assert chosen["optimizer"] == "AdamW, lr 0.01, weight decay 0.01, betas 0.9, 0.999"
    find_line(chosen["reported"], "best_on_test")


@pytest.mark.parametrize("shots", [1, 5, 10])
def test_few_shots_are_scikit_learns_on_the_same_draws(pixels, shots):
    values, chosen = outcome_of(f"few-shot-{shots}", pixels, draws=3, seed=4)
    test, expected = pixels.test[0].numpy(), []
    for draw in range(3):
        part = draw_shots(pixels.labels, shots, 4, draw)
        assert (pixels.labels[part].bincount() == shots).all()
        train = pixels.train(0)[0, part].numpy()
        scaler = StandardScaler().fit(train)
        model = LogisticRegression(C=1.0, max_iter=1000).fit(scaler.transform(train), pixels.labels[part].numpy())
        expected.append(model.score(scaler.transform(test), pixels.test_labels.numpy()))
    assert chosen["each"] == pytest.approx(expected, abs=0.01)
    assert values["mean"] == pytest.approx(sum(chosen["each"]) / 3)
    assert 0 < values["std"] == pytest.approx(statistics.stdev(chosen["each"]))
    assert (values, chosen) == outcome_of(f"few-shot-{shots}", pixels, draws=3, seed=4)
    assert values != outcome_of(f"few-shot-{shots}", pixels, draws=3, seed=5)[0]
    assert outcome_of(f"few-shot-{shots}", pixels, draws=1)[0]["std"] == 0


def test_fewer_shots_of_a_draw_are_among_more(pixels):
    one, five = (set(draw_shots(pixels.labels, shots, 0, 2).tolist()) for shots in (1, 5))
    assert one < five
    assert one.isdisjoint(draw_shots(pixels.labels, 1, 0, 3).tolist())


def test_features_are_pooled_tokens_of_one_layer_in_one_pass(digits):
    """Of a denoiser, under the null label and the fixed noise of an image."""
    options = Classification(
        layer="2", time=0.2, norm=True, seed=1, batch_size=2, max_train=5, max_test=3, neighbours=2
    )
    net, two = tiny_net().eval(), replace(options, protocol=("logistic", "knn"))
    network = ProbedNetwork(net, "tiny", "tiny", {}, VP())
    classifying = Classifying(network, digits, two)
    assert classifying.pools == {"logistic": "all", "knn": "mean"}
    assert Classifying(network, digits, replace(two, pool="all")).pools == {"logistic": "all", "knn": "all"}
    found = classifying.prober(CPU, "float32").stored_cells(["all", "mean"], Processes())
    chosen = choose_images(two, digits)
    for split, images, part in zip(("train", "test"), (digits.train, digits.test), chosen, strict=True):
        x = images.images[part].float() / 127.5 - 1
        noise = normal("probe", 1, split, 0, rows=torch.tensor(part), shape=(1, 8, 8))
        t = torch.full((len(part),), 0.2)
        with torch.no_grad():
            tokens = net.norm(list(net.forward_intermediates(VP().add_noise(x, noise, t), t))[2])
        for pool, expected in {"all": tokens.mean(dim=1), "mean": tokens[:, 2:].mean(dim=1)}.items():
            actual = found[pool].train(0) if split == "train" else found[pool].test
            torch.testing.assert_close(actual, expected[None])
    assert found["all"].labels.tolist() == digits.train.labels[chosen[0]].tolist()


def test_every_protocol_evaluates_a_checkpoint_of_an_encoder(encoder, tmp_path, monkeypatch, capsys):
    few = ["--max-train", 400, "--max-test", 100, "--epochs", 20, "--draws", 2]
    options = ["--protocol", ",".join(SINGLE), *few]
    evaluate(monkeypatch, tmp_path, "classify", "--ckpt", encoder, "--data", "digits", *options)
    (path,) = (tmp_path / "classify").glob("*.json")
    assert path.name.startswith("digits_mae-version_3-last-step5-ema-digits-max_train-400-max_test-100-draws-2-")
    assert path.name.rpartition("_")[0].endswith(
        "-protocol-in100-linear+logistic+knn+few-shot-1+few-shot-5+few-shot-10-epochs-20"
    )
    report = json.loads(path.read_text())
    assert list(report["protocols"]) == SINGLE
    about = report["features"]
    assert (about["train"], about["test"], about["classes"], about["pictures"]) == (400, 100, 10, "as stored, 8")
    assert (about["layer"], about["name"], about["norm"], about["input"]) == (2, "blocks.1", "none", "clean images")
    pools = {name: result["chosen"]["pool"] for name, result in report["protocols"].items()}
    assert pools == {name: PROTOCOLS[name].pool for name in pools}
    accuracies = {name: next(iter(result["values"].values())) for name, result in report["protocols"].items()}
    assert all(0 < accuracy < 1 for accuracy in accuracies.values())
    out = capsys.readouterr().out
    for part in ("in100-linear: last", "best on test", "knn: test", "k 20; T 0.07", "pool all", "few-shot-5: mean"):
        assert part in out, part


def test_results_of_files_of_one_name_have_other_names(digits, tmp_path):
    network = ProbedNetwork(tiny_net(), "last", "last", {}, VP())
    files = [tmp_path / "one" / "last.pth", tmp_path / "two" / "last.pth"]
    tests = [None, "one/test", "two/test"]
    names = {ProbedOptions(ckpt=file, test=test).name_result(network, digits, "") for file in files for test in tests}
    assert len(names) == 6
    assert all(name.startswith("last-digits") for name in names)


def test_the_data_are_those_of_the_training_and_have_test_images(digits, image_dir, tmp_path):
    network = ProbedNetwork(tiny_net(), "last", "last", {}, VP(), data="digits", fingerprint=digits.fingerprint)
    assert open_probed_data(network, None, None).fingerprint == digits.fingerprint
    with raises_user_error("last", "digits", "`data`"):
        open_probed_data(replace(network, fingerprint="other"), None, None)
    options = {"path": str(image_dir), "channels": 1, "image_size": 8, "batch_size": 4}
    config = {"data": {"class_path": "uvit_decay.data.Images", "init_args": options}}
    (tmp_path / "own.yaml").write_text(json.dumps(config))
    with raises_user_error("`test`"):
        open_probed_data(network, str(tmp_path / "own.yaml"), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--protocol", "linear"], ("--protocol", "in100-linear", "logistic", "knn")),
        (["--time", "0.1"], "--time"),
        (["--norm"], ("MAE", "norm")),
        (["--protocol", "knn,logistic", "--epochs", "7"], ("--epochs", "--protocol knn,logistic")),
        (["--protocol", "knn", "--knn-uniform", "--temperature", "0.1"], ("--temperature", "--knn-uniform")),
        (["--protocol", "logistic", "--temperature", "0.1"], ("--temperature", "--protocol")),
        (["--protocol", "few-shot-10", "--max-train", "60"], "10 training"),
        (["--out", "a.txt"], ".json"),
        (["--test", "nowhere"], "digits"),
    ],
)
def test_what_cannot_be_classified_is_one_line(encoder, tmp_path, monkeypatch, capsys, options, message):
    options = ["--ckpt", encoder, "--data", "digits", *options]
    find_line(refused(monkeypatch, tmp_path, capsys, "classify", *options), message)


def test_one_class_and_a_missing_class_token_are_one_line(digits, monkeypatch):
    network = ProbedNetwork(tiny_net(), "tiny", "tiny", {}, VP())
    with raises_user_error("UViT", "class token"):
        Classifying(network, digits, Classification(pool="cls"))
    monkeypatch.setattr(digits, "class_names", ("0",))
    with raises_user_error("digits", "1 classes"):
        Classifying(network, digits, Classification())


def test_raw_pixels_are_a_baseline(pixels, tmp_path, monkeypatch, capsys):
    options = ["--data", "digits", "--protocol", "knn,in100-linear", "--epochs", 3, "--out", "p.json"]
    evaluate(monkeypatch, tmp_path, "classify", "--ckpt", "pixels:8x8x1", *options)
    report = json.loads((tmp_path / "p.json").read_text())
    scaled = cells(pixels.train(0)[0] * 2 - 1, pixels.labels, pixels.test[0] * 2 - 1, pixels.test_labels)
    expected = outcome_of("knn", scaled)[0]["test"]
    assert report["protocols"]["knn"]["values"]["test"] == pytest.approx(expected, abs=0.005)
    assert report["features"]["name"] == "pixels"
    for size, message in (("8", "pixels:32x32x3"), ("16x16x1", ("8x8x1", "16x16x1"))):
        line = refused(monkeypatch, tmp_path, capsys, "classify", "--ckpt", f"pixels:{size}", *options)
        find_line(line, message)
