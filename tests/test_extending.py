"""Results of the examples of docs/extending.md, and refusals; test_docs.py runs them as printed."""

import json

import pytest
import torch
import yaml
from conftest import ROOT, pixels, sample, train
from evaluations import evaluate, refused
from refusals import find_line
from refusals import refused as refuse
from test_docs import code

from uvit_decay.pictures import save_npz


def test_a_network_that_lacks_something_is_refused_before_training(mine, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        code("A network").replace("self.config", "settings").replace(", self.null_label", ", self.other")
    )
    with pytest.raises(SystemExit):
        train(monkeypatch, tmp_path, "fit", "--trust", "mine", "--model.net", "mine.ConvNet")
    line = capsys.readouterr().err.strip().splitlines()[-1]
    find_line(line, "ConvNet", "null_label, config", "docs/extending.md")
    assert not [*tmp_path.rglob("*.ckpt")]


def test_a_dispersive_loss_is_that_of_its_equation(mine):
    names = {"__name__": "mine"}
    exec(code("An auxiliary loss"), names)
    states = {"a": torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(0))}
    z = states["a"].flatten(1).double()
    pairs = torch.tensor([[float((a - b).square().mean()) for a in z] for b in z])
    expected = (-pairs / 0.5).exp().mean().log()
    assert float(names["Dispersive"]()(states, None, None)) == pytest.approx(float(expected), rel=1e-5)


def test_an_own_sampler_and_an_own_protocol_are_named_by_flags(mine, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(code("A sampler", "A probe protocol"))
    file = ROOT / "checkpoints" / "digits.safetensors"
    sample(monkeypatch, tmp_path, "--trust", "mine", "--sampler", "midpoint", "--num", "10", "--out", "own.npz")
    assert pixels(tmp_path / "own.npz").shape == (10, 8, 8, 1)
    options = ["--trust", "mine", "--protocol", "nearest-mean", "--times", "0.1", "--max-train", "200", "--out", "own"]
    evaluate(monkeypatch, tmp_path, "probe", "--ckpt", file, *options)
    report = json.loads((tmp_path / "own" / "probes.json").read_text())
    assert report["protocol"]["classifier"] == "nearest class mean"
    assert report["best"]["best_on_test_accuracy"] > 0.2  # of 10 classes
    assert "nearest-mean" in report["number"]


@pytest.mark.slow
def test_an_own_schedule_has_a_name_where_its_module_is_trusted(programs, tmp_path):
    # In processes of their own: beartype and jsonargparse keep the names that the table had when they first read it.
    (tmp_path / "mine.py").write_text(code("A decay schedule"))
    small = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.max_steps=1", "--data.batch_size=4"]
    small += ["--trainer.limit_val_batches=0", "--trainer.callbacks=LastCheckpoint"]
    train_mine = ["train.py", "fit", "--trust=mine", *small]
    assert programs.start(*train_mine, "--model.net.schedule=early", cwd=tmp_path).wait() == 0
    file = tmp_path / "runs" / "digits" / "version_0" / "checkpoints" / "last.ckpt"
    contents = torch.load(file, weights_only=True)
    assert type(contents["settings"]["model.net.schedule"]) is str
    alphas = contents["state_dict"]["net.alphas"]
    assert alphas.tolist() == pytest.approx([1 - 0.3 * (k / 5) ** 0.5 for k in range(6)])
    sample_it = ["sample.py", "--ckpt", str(file), "--num", "2", "--steps", "1", "--out"]
    assert programs.start(*sample_it, "own.npz", "--trust", "mine", cwd=tmp_path).wait() == 0
    assert pixels(tmp_path / "own.npz").shape == (2, 8, 8, 1)
    untrusted = programs.start(*sample_it, "other.npz", cwd=tmp_path)
    assert untrusted.wait() == 2
    find_line(untrusted.last_line, file, "schedule", "early", "--trust")


def test_an_own_loss_is_named_by_its_class_alone(mine, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(code("An auxiliary loss"))
    small = ["--model.net.dim=16", "--model.net.depth=2", "--trainer.max_steps=1", "--data.batch_size=4"]
    small += ["--trainer.limit_val_batches=0", "--trainer.callbacks=LastCheckpoint"]
    train(monkeypatch, tmp_path, "fit", "--trust=mine", *small, "--model.auxiliary+=Dispersive")
    run = tmp_path / "runs" / "digits" / "version_0"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert [loss["class_path"] for loss in config["model"]["init_args"]["auxiliary"]] == ["mine.Dispersive"]
    line = refuse(capsys, train, monkeypatch, tmp_path, "fit", "--trust=mine", "--model.auxiliary+=Dispersion")
    find_line(line, "auxiliary", "Dispersion")


GENERATION = ["--reference", "digits:train", "--features", "digits"]
FILE = ["--ckpt", ROOT / "checkpoints" / "digits.safetensors"]


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["probe", *FILE, "--protocol", "own"], ("protocol", "ddae", "'own'")),
        (["classify", *FILE, "--protocol", "own"], ("protocol", "logistic", "'own'")),
        (["generation", *FILE, *GENERATION, "--sampler", "own"], ("sampler", "euler", "'own'")),
        (["generation", *FILE, *GENERATION, "--metrics", "own"], ("fd,fid,fdd,is,kid", "own")),
        (["generation", *FILE, *GENERATION[:3], "own"], ("inception, digits, small-cnn", "own")),
    ],
)
def test_a_name_that_is_in_no_table_is_one_line_with_the_names(words, fragments, tmp_path, monkeypatch, capsys):
    find_line(refused(monkeypatch, tmp_path, capsys, *words), *fragments)


@pytest.mark.parametrize("text", [None, "def f(:\n", "import sys\nsys.exit(3)\n"])
def test_a_module_that_cannot_be_imported_is_one_line(text, mine, tmp_path, monkeypatch, capsys):
    if text:
        (tmp_path / "mine.py").write_text(text)
    line = refused(monkeypatch, tmp_path, capsys, "probe", "--ckpt", "x.ckpt", "--trust", "mine")
    assert "--trust mine" in line


@pytest.fixture
def extended(mine, tmp_path):
    """Return a module with the metric and the extractor of the page."""
    (tmp_path / "mine.py").write_text(code("A metric", "An extractor of features"))
    return ["--trust", "mine"]


@pytest.fixture
def sides(tmp_path):
    """Return two files of ten images each: black ones, and ones of which every pixel is (3, 4, 0)."""
    black = torch.zeros(10, 3, 8, 8, dtype=torch.uint8)
    save_npz(tmp_path / "black.npz", [black], 10)
    save_npz(tmp_path / "dark.npz", [black + torch.tensor([3, 4, 0], dtype=torch.uint8)[:, None, None]], 10)
    return ["--samples", "dark.npz", "--reference", "black.npz", "--out", "report.json"]


def test_values_are_in_the_reports(extended, sides, tmp_path, monkeypatch, capsys):
    options = ["--features", "colours", "--metrics", "fd,mean", "--allow-few"]
    evaluate(monkeypatch, tmp_path, "generation", *sides, *options, *extended)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["values"]["mean_distance"] == pytest.approx(16**0.5 * 5)  # 16 parts, each |(3, 4, 0)| away
    assert report["values"]["fd"] == pytest.approx(16 * 25)
    assert set(report["metrics"]) == {f"{name}/dark-10_vs_black-10_colours" for name in ("fd", "mean_distance")}
    assert report["protocol"]["extractor"] == "colours-000000000000"
    find_line(report["remarks"], "colours", "Inception")
    page = " ".join((tmp_path / "report.html").read_text().split())
    assert "Distance of means" in page
    assert "20.000" in page
    assert "how far apart the average features are; <strong>lower is better</strong>" in page
    assert "mean_distance 20" in capsys.readouterr().out


def test_what_they_lack_is_one_line(extended, sides, tmp_path, monkeypatch, capsys):
    base = ["generation", *sides, *extended, "--features", "colours", "--metrics"]
    for metric, message in (("is", ("is", "logits", "colours")), ("fd", ("fd", 49))):
        find_line(refused(monkeypatch, tmp_path, capsys, *base, metric), message)
