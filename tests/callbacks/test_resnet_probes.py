"""The rank of a ResNet's pooled features over the epochs of its training: from the run to the table that compares."""

import pytest
import torch
import yaml
from conftest import tiny_trainer
from evaluations import evaluate
from runs import StopAt

from uvit_decay import checkpoint
from uvit_decay.callbacks import LinearProbes
from uvit_decay.data import Digits
from uvit_decay.nn import ResNet
from uvit_decay.pictures import to_float
from uvit_decay.runs import history
from uvit_decay.runtime.random import subset
from uvit_decay.tasks import ClassifyTask

TEST = 100  # images


def probes(**options):
    return LinearProbes(max_train=100, max_test=TEST, **options)


def classifier():
    torch.manual_seed(0)
    return ClassifyTask(ResNet(8, 1, width=8, num_classes=10, stem="cifar", alpha_min=0.7, pixels="unit"))


def fit(folder, *callbacks, data, ckpt_path=None, **options):
    """Train without EMA, which batch-normed networks refuse."""
    tiny_trainer(folder, *callbacks, **options).fit(classifier(), data, ckpt_path=ckpt_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train three epochs of 2 steps on digits, with probes after each."""
    folder = tmp_path_factory.mktemp("resnet")
    fit(folder, probes(every_n_epochs=1), max_steps=6, data=Digits(512), limit_val_batches=1.0)
    return folder


def test_the_ranks_of_the_last_epoch_are_those_of_the_pooled_features(run):
    *_, last = lines = history.read(run / "probes.jsonl")
    assert [line.step for line in lines] == [2, 4, 6]
    assert last.metadata["tracked"] == "avgpool"
    net, data = checkpoint.load(run / "checkpoints" / "last.ckpt").net, Digits()
    data.setup()
    pooled = []
    net.avgpool.register_forward_hook(lambda module, args, out: pooled.append(out.flatten(1)))
    with torch.no_grad():
        net(to_float(data.test[subset(data.test, TEST, "probe test")][0]))
    x = pooled[0].double().numpy()
    for name, centred in {
        "tracked_spectrum_entropy": x - x.mean(axis=1, keepdims=True),
        "tracked_effective_rank_exp": x - x.mean(axis=0, keepdims=True),
    }.items():
        variance = torch.linalg.svdvals(torch.from_numpy(centred)) ** 2
        p = variance / variance.sum()
        entropy = float(-(p * p.clamp(min=1e-300).log()).sum())
        expected = entropy if name == "tracked_spectrum_entropy" else float(torch.tensor(entropy).exp())
        assert last.values[name] == pytest.approx(expected, rel=1e-4), name


def test_epochs_are_counted_in_global_batches(tmp_path):
    """Two micro-batches a batch, every second epoch; a run resumed in mid-epoch counts as one that was not stopped."""

    def data():
        return Digits(512, device_batch_size=256)

    stopped = tmp_path / "stopped"
    fit(stopped, probes(every_n_epochs=2), StopAt(3), max_steps=9, data=data())
    assert [line.step for line in history.read(stopped / "probes.jsonl")] == [3]
    last = stopped / "checkpoints" / "last.ckpt"
    fit(tmp_path / "rest", probes(every_n_epochs=2), max_steps=9, ckpt_path=last, data=data())
    assert [line.step for line in history.read(tmp_path / "rest" / "probes.jsonl")] == [3, 4, 8, 9]


def test_compare_reads_the_run(run, tmp_path, monkeypatch, capsys):
    net = {"class_path": "uvit_decay.nn.ResNet", "init_args": {"depth": 8, "alpha_min": 0.7}}
    (run / "config.yaml").write_text(yaml.safe_dump({"seed_everything": 0, "model": {"init_args": {"net": net}}}))
    evaluate(monkeypatch, tmp_path, "compare", str(run), "--x", "net.depth")
    shown = capsys.readouterr()
    header, _, row, _ = shown.out.splitlines()[:4]
    columns = "| alpha_min | net.depth | runs | best probe | best on test | kNN | entropy of the spectrum of mean "
    assert header.startswith(columns)
    assert row.startswith("| 0.7 | 8 | 1 | ")
    assert shown.err == ""
