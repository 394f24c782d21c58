"""The rank of a ResNet's pooled features over the epochs of its training."""

import pytest
import torch
from conftest import tiny_trainer

from uvit_decay import checkpoint
from uvit_decay.callbacks import LinearProbes
from uvit_decay.data import Digits
from uvit_decay.nn import ResNet
from uvit_decay.pictures import to_float
from uvit_decay.runs import history
from uvit_decay.runtime.random import subset
from uvit_decay.tasks import ClassifyTask

TEST = 100  # images


def test_the_ranks_of_the_last_epoch_are_those_of_the_pooled_features(tmp_path):
    """Without EMA, which batch-normed networks refuse; three epochs of 2 steps, with probes after each."""
    torch.manual_seed(0)
    task = ClassifyTask(ResNet(8, 1, width=8, num_classes=10, stem="cifar", alpha_min=0.7, pixels="unit"))
    probes = LinearProbes(max_train=100, max_test=TEST, every_n_epochs=1)
    tiny_trainer(tmp_path, probes, max_steps=6, limit_val_batches=1.0).fit(task, Digits(512))
    *_, last = lines = history.read(tmp_path / "probes.jsonl")
    assert [line.step for line in lines] == [2, 4, 6]
    assert last.metadata["tracked"] == "avgpool"
    net, data = checkpoint.load(tmp_path / "checkpoints" / "last.ckpt").net, Digits()
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
