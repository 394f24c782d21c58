"""The grid of probes: planted signals are found where they are, and many processes find what one does."""

import json
import threading

import pytest
import torch
from conftest import tiny_net
from evaluations import evaluate
from refusals import find_line
from small_mae import mae_task

from uvit_decay.data import Digits
from uvit_decay.data.batches import InMemory
from uvit_decay.diffusion.noise_path import VP
from uvit_decay.nn.intermediates import HasIntermediates, Layer
from uvit_decay.pictures import to_float
from uvit_decay.representations import features, probing
from uvit_decay.representations.probe_options import Probing
from uvit_decay.representations.probing import Prober, choose_images
from uvit_decay.representations.rank import spectrum_entropy
from uvit_decay.runtime.distributed import Processes

CPU = torch.device("cpu")


class Planted(torch.nn.Module):
    """Five layers of noise; only layer 3, and only at t = 0.1, shows what the first pixel of the image says."""

    layers = tuple(Layer(f"blocks.{i}", "encoder") for i in range(5))
    num_prefix_tokens, dim, num_classes, null_label = 1, 12, 3, True

    def forward_intermediates(self, x, t, y=None):
        assert y is None
        for layer in range(5):
            state = torch.randn(len(x), 5, self.dim, generator=torch.Generator().manual_seed(layer))
            if layer == 3:
                told = x[:, 0, 0, :3] / 0.99 * (t == 0.1)[:, None]  # alpha_t of VP is near 1 there
                state[:, 1:, :3] += 3 * told[:, None]
            yield state


def planted_data() -> Digits:
    """Return 600 images of three classes whose first three pixels are the one-hot class."""
    data, random = Digits(), torch.Generator().manual_seed(1)
    data.class_names = ("a", "b", "c")
    for split in ("train", "test"):
        labels = torch.randint(3, (600,), generator=random)
        images = torch.randint(100, (600, 1, 8, 8), generator=random, dtype=torch.uint8)
        images[:, 0, 0, :3] = 255 * torch.nn.functional.one_hot(labels, 3).to(torch.uint8)
        setattr(data, split, InMemory(images, labels))
    return data


def test_a_planted_signal_is_found_there_and_nowhere_else():
    assert isinstance(Planted(), HasIntermediates)
    grid = Prober(Planted(), VP(), planted_data(), Probing(times=(0.05, 0.1, 0.3)), CPU).grid(Processes())
    assert grid.best() == (1, 3)
    for name in ("test_accuracy", "knn_accuracy"):
        actual = grid.scores[name]
        assert actual[1, 3] > 0.9, name
        elsewhere = actual.flatten()[torch.arange(15) != 8]
        assert (elsewhere - 1 / 3).abs().max() < 0.1, name


def test_chosen_layers_and_small_memory_give_the_same_cells(digits, monkeypatch):
    net = tiny_net().eval()
    small = {"times": (0.1, 0.4), "max_train": 200, "max_test": 100}
    whole = Prober(net, VP(), digits, Probing(**small), CPU).grid(Processes())
    part = Prober(net, VP(), digits, Probing(**small, layers=("2", net.layers[0].name)), CPU).grid(Processes())
    assert list(part.layers) == [0, 2]
    monkeypatch.setattr(probing, "FEATURES", 4 * 300 * net.dim)  # one layer at a time
    split = Prober(net, VP(), digits, Probing(**small), CPU).grid(Processes())
    for name, actual in whole.scores.items():
        torch.testing.assert_close(part.scores[name], actual[:, [0, 2]])
        torch.testing.assert_close(split.scores[name], actual)


def test_levels_in_several_threads_give_the_same_cells(digits, monkeypatch):
    net = tiny_net().eval()
    prober = Prober(net, VP(), digits, Probing(times=(0.05, 0.1, 0.3), max_train=200, max_test=100), CPU)
    grids, seen = [], []
    level = Prober._level

    def watched(self, number):
        seen.append(threading.current_thread())
        return level(self, number)

    monkeypatch.setattr(Prober, "_level", watched)
    for threads in (1, 3):
        monkeypatch.setattr(features, "free_threads", lambda threads=threads: threads)
        grids.append(prober.grid(Processes()).scores)
    assert [thread is threading.main_thread() for thread in seen] == 3 * [True] + 3 * [False]
    assert all(torch.equal(grids[0][name], grids[1][name]) for name in grids[0])


def test_the_script_writes_table_protocol_and_image(trained, tmp_path, monkeypatch, capsys):
    options = ["--ckpt", trained, "--times", "0.05,0.3", "--max-train", 300, "--max-test", 100, "--precision", "bf16"]
    evaluate(monkeypatch, tmp_path, "probe", *options)
    name = "last-step12-ema-digits-max_train-300-max_test-100-times-0.05+0.3-bf16"
    (found,) = (tmp_path / "probes").glob(f"{name}_*")
    lines = (found / "probes.csv").read_text().splitlines()
    assert lines[0].split(",")[:7] == [
        *("layer", "name", "kind", "t", "held_out_accuracy", "test_accuracy", "best_on_test_accuracy")
    ]
    assert lines[0].split(",")[-3:] == ["spectrum_entropy", "effective_rank_exp", "mean_share"]
    assert all(0 < float(line.split(",")[-1]) < 1 for line in lines[1:])
    assert [line.split(",")[2] for line in lines[1:5]] == ["embeddings", "encoder", "middle", "decoder"]
    report = json.loads((found / "probes.json").read_text())
    expected = {"weights": "ema", "label": "null", "train": 300, "precision": "bf16"}
    assert expected.items() <= report["protocol"].items()
    assert report["best"]["best_on_test_accuracy_of_all_cells"] >= report["best"]["test_accuracy"]
    assert (found / "probes.png").stat().st_size > 1000
    find_line(capsys.readouterr().out, "best on test")


@pytest.mark.slow
def test_two_processes_find_the_same_grid(programs, trained, tmp_path, monkeypatch):
    options = ["--ckpt", str(trained), "--times", "0.05,0.1,0.3", "--max-train", "100", "--max-test", "50"]
    options += ["--noise-draws", "2", "--noise-images", "40"]
    programs.run_ranks(2, "evaluate.py", "probe", *options, "--out", "2", cwd=tmp_path)
    evaluate(monkeypatch, tmp_path, "probe", *options, "--out", tmp_path / "1")
    for name in ("probes.csv", "noise_share.csv"):
        one, two = ((tmp_path / str(processes) / name).read_text() for processes in (1, 2))
        assert one == two


def test_the_rank_of_an_encoder_is_that_of_its_class_tokens(digits):
    net = mae_task().net.eval()
    options = Probing(max_train=60, max_test=50, neighbours=5)
    grid = Prober(net, None, digits, options, CPU).grid(Processes())
    x = to_float(digits.test[choose_images(options, digits)[1]][0])
    with torch.no_grad():
        states = list(net.forward_intermediates(x))
    expected = [spectrum_entropy(state[:, 0]) for state in states]
    assert grid.scores["spectrum_entropy_of_cls"][0].tolist() == pytest.approx(expected, rel=1e-4)
    assert spectrum_entropy(states[-1][:, 1:].mean(dim=1)) != pytest.approx(expected[-1], rel=1e-2)
    assert "spectrum_entropy" not in grid.scores
