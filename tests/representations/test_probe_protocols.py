"""Protocols of probes by name: what each measures, its noise, its averages over draws, and the names of its numbers."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import tiny_net
from evaluations import evaluate, refused
from refusals import find_line

from uvit_decay.diffusion.noise_path import VP
from uvit_decay.representations import probe_protocols
from uvit_decay.representations.linear_probes import DDAE, REPA, accuracies
from uvit_decay.representations.probe_options import Alignment, Classification, Probing
from uvit_decay.representations.probe_protocols import PROTOCOLS
from uvit_decay.representations.probing import Prober, choose_images
from uvit_decay.representations.reference import Neighbourhood, ReferenceFeatures, cknna
from uvit_decay.runtime.distributed import Processes

CPU = torch.device("cpu")
SMALL = {"times": (0.05, 0.4), "max_train": 200, "max_test": 60, "layers": ("1", "2")}


def grid_of(data, reference=None, **options):
    return prober(data, reference, **options).grid(Processes())


def prober(data, reference=None, **options):
    return Prober(tiny_net().eval(), VP(), data, Probing(**SMALL, **options), CPU, reference=reference)


def pixels(data, count=60, rows=None):
    """Return the pixels of the test images that are probed, as a reference."""
    rows = list(range(count)) if rows is None else rows
    chosen = choose_images(Probing(**SMALL), data)[1]
    x = data.test.images[[chosen[row] for row in rows]].flatten(1).float()
    return ReferenceFeatures(x, rows, {"checkpoint": "pixels", "images": len(rows), "neighbours": 10})


def test_every_pass_of_ddae_has_noise_of_its_own_and_the_first_is_that_of_the_others(digits):
    cells = prober(digits, protocol="ddae").cells(1, layers=[1, 2])
    first, again, second = cells.train(0), cells.train(0), cells.train(1)
    others = prober(digits).cells(1)
    assert torch.equal(first, others.train(0))
    assert torch.equal(cells.test, others.test)
    assert torch.equal(first, again)
    assert (first - second).abs().mean() > 0.01
    found = grid_of(digits, protocol="ddae", epochs=3).scores["test_accuracy"][1]
    *_, models = replace(DDAE, epochs=3).passes(cells.train, cells.labels, 10, CPU)
    assert torch.equal(found, accuracies(models, cells.test, cells.test_labels, CPU))
    assert (DDAE.epochs, REPA.epochs) == (15, 90)


def test_repa_is_a_probe_of_one_noise_an_image_and_an_alignment_of_each_cell(digits):
    rows = list(range(0, 60, 2))
    reference = pixels(digits, rows=rows)
    grid = grid_of(digits, reference, protocol="repa", epochs=4)
    cells = prober(digits).cells(0)
    *_, models = replace(REPA, epochs=4).passes(lambda _: cells.train(0), cells.labels, 10, CPU)
    assert torch.equal(grid.scores["test_accuracy"][0], accuracies(models, cells.test, cells.test_labels, CPU))
    expected = [cknna(Neighbourhood.of(x[rows]), Neighbourhood.of(reference.features)) for x in cells.test]
    assert torch.equal(grid.scores["cknna"][0], torch.stack(expected))
    assert grid.scores["cknna"][0].max() > grid.scores["cknna"][1].max()  # at t = 0.4 less of the image is left


@pytest.mark.parametrize("protocol", ["paper", "ddae", "repa"])
def test_draws_are_averaged_with_their_spread_and_the_first_is_the_single_one(digits, protocol, tmp_path, monkeypatch):
    monkeypatch.setattr(probe_protocols, "DDAE", replace(DDAE, lr=0.1))  # learns something of so few images
    options = {"protocol": protocol, "seed": 3} | ({} if protocol == "paper" else {"epochs": 3})
    reference = pixels(digits) if protocol == "repa" else None
    three, one = (grid_of(digits, reference, draws=draws, **options) for draws in (3, 1))
    each = torch.stack([prober(digits, reference, draws=3, **options)._level(job) for job in range(6)])
    each = each.unflatten(0, (2, 3))  # levels, draws, scores, layers
    for k, name in enumerate(PROTOCOLS[protocol].scores):
        assert torch.equal(one.scores[name], each[:, 0, k])
        torch.testing.assert_close(three.scores[name], each[:, :, k].mean(dim=1))
        torch.testing.assert_close(three.spread[name], each[:, :, k].std(dim=1))
    assert not one.spread
    assert three.spread[PROTOCOLS[protocol].scores[-1]].max() > 0
    three.save(tmp_path, "draws", {"weights": "ema"})
    header = (tmp_path / "probes.csv").read_text().splitlines()[0]
    assert header.endswith(f"{PROTOCOLS[protocol].scores[-1]}_std")
    assert "in 3 draws, averaged, seed 3" in json.loads((tmp_path / "probes.json").read_text())["number"]


def test_a_number_that_is_chosen_on_test_is_called_so(digits):
    grid = grid_of(digits, protocol="ddae", epochs=1)
    summary = grid.summary()
    assert summary["best_on_test_accuracy"] == float(grid.scores["test_accuracy"].max())
    assert "test_accuracy" not in summary
    find_line(grid.number("ema"), "ddae", "ema", "mean", "0.05,0.4", "seed 0", "best of 4", "best_on_test")
    assert grid.protocol["best_cell_chosen_on"].startswith("test images")
    find_line(grid.text("ema"), "best on test")
    of_paper = grid_of(digits)
    find_line(of_paper.number("raw"), "best of 4", "held-out")
    assert "best_on_test" not in of_paper.number("raw")
    assert "test_accuracy" in of_paper.summary()


def test_names_have_the_options_that_are_not_the_defaults():
    assert Alignment().name == ""
    assert Alignment(reference_size=98, alignment_images=10000).name == "-reference_size-98-alignment_images-10000"
    assert Classification(batch_size=3).name == ""
    assert Classification(pool="cls", layer="3", norm=True).name == "-pool-cls-layer-3-norm-True"


def test_repa_by_name_with_a_checkpoint_as_reference(trained, encoder, tmp_path, monkeypatch, capsys):
    options = ["--times", "0.05,0.3", "--max-train", 100, "--max-test", 60, "--layers", "1,2", "--epochs", 2]
    options += ["--protocol", "repa", "--reference", encoder, "--alignment-images", 40, "--draws", 2]
    evaluate(monkeypatch, tmp_path, "probe", "--ckpt", trained, *options)
    changed = "max_train-100-max_test-60-draws-2-times-0.05+0.3-layers-1+2-protocol-repa-epochs-2-"
    name = f"last-step12-ema-digits-{changed}digits_mae-version_3-last-step5-ema-alignment_images-40"
    (folder,) = (tmp_path / "probes").glob(f"{name}_*")
    report = json.loads((folder / "probes.json").read_text())
    about = report["protocol"]["reference"]
    assert (about["checkpoint"], about["images"], about["neighbours"]) == (str(encoder), 40, 10)
    assert (report["protocol"]["protocol"], report["protocol"]["draws"], report["protocol"]["epochs"]) == ("repa", 2, 2)
    assert len(report["cells"]) == 4
    assert {"cknna", "cknna_std"} < set(report["cells"][0])
    assert report["best"]["best_cknna_of_all_cells"] == max(cell["cknna"] for cell in report["cells"])
    assert {path.name for path in folder.iterdir()} == {"probes.csv", "probes.json", "probes.png", "cknna.png"}
    find_line(capsys.readouterr().out, "CKNNA, k 10, 40 test", encoder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--times", "0,0.5"], ("--times", "(0, 1)")),
        (["--data", "nowhere"], ("--data nowhere", "digits, cifar10, cifar100")),
        (["--protocol", "repa", "--reference", "itself"], ("--reference", "clean pictures")),
        (["--epochs", "3"], ("--epochs", "--protocol paper")),
        (["--protocol", "noise-share", "--knn-uniform"], ("--knn-uniform", "--protocol noise-share")),
        (["--reference", "pixels:8x8x1"], ("--reference", "--reference-size", "--alignment-images")),
        (["--protocol", "repa", "--max-test", "11"], ("10 nearest", "12 test")),
        (["--protocol", "repa", "--reference", "timm:test_vit", "--reference-size", "33"], 33),
    ],
)
def test_what_cannot_be_probed_is_one_line(trained, tmp_path, monkeypatch, capsys, options, message):
    options = [trained if word == "itself" else word for word in options]
    find_line(refused(monkeypatch, tmp_path, capsys, "probe", "--ckpt", trained, *options), message)
