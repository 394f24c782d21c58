"""The classifiers of all layers at once are those that torch's modules train one by one."""

import torch

from uvit_decay.representations.adam_probe import AdamProbe, Classifiers
from uvit_decay.runtime.random import generator

CPU = torch.device("cpu")


def alone(probe, passes, labels, test, test_labels, classes):
    """One layer, by BatchNorm1d and Linear."""
    start = Classifiers(1, test.shape[1], classes, probe.seed)
    linear = torch.nn.Linear(test.shape[1], classes)
    with torch.no_grad():
        linear.weight.copy_(start.weight[0].T)
        linear.bias.copy_(start.bias[0, 0])
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(test.shape[1], affine=False), linear)
    optimizer = torch.optim.Adam(model.parameters(), probe.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, probe.epochs)
    for epoch in range(probe.epochs):
        order = torch.randperm(len(labels), generator=generator("adam probe", "order", probe.seed, epoch))
        for part in order.split(probe.batch_size):
            if len(part) > 1:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(passes[epoch][part]), labels[part]).backward()
                optimizer.step()
        schedule.step()
    return (model.eval()(test).argmax(dim=1) == test_labels).double().mean()


def test_layers_are_trained_as_if_each_were_alone_with_the_features_of_each_pass():
    random = torch.Generator().manual_seed(0)
    labels, test_labels = (torch.randint(3, (n,), generator=random) for n in (101, 60))
    centres = torch.randn(2, 3, 5, generator=random)
    noisy = lambda y: centres[:, y] + torch.randn(2, len(y), 5, generator=random)  # noqa: E731
    passes, test = [noisy(labels) for _ in range(6)], noisy(test_labels)
    probe = AdamProbe(epochs=6, batch_size=20, lr=0.05, seed=4)  # the last batch is of one image
    asked = []
    train = lambda epoch: asked.append(epoch) or passes[epoch]  # noqa: E731
    with torch.no_grad():
        actual = probe.accuracies(train, labels, test, test_labels, 3, CPU)
    assert asked == list(range(6))
    for layer in range(2):
        expected = alone(probe, [x[layer] for x in passes], labels, test[layer], test_labels, 3)
        assert actual[layer] == expected
    assert (actual > 0.6).all()
