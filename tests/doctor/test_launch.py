"""Variables of launchers against --trainer.devices and --trainer.num_nodes."""

from contextlib import nullcontext

import pytest
from lightning.pytorch import Trainer

from uvit_decay.runtime.errors import UserError
from uvit_decay.tasks.sharding import check_nodes

TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
BY_HAND = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0"}


def counted(monkeypatch, devices, nodes, environment):
    """A trainer in an environment, whose strategy is ddp if there are several processes."""
    for name, word in environment.items():
        monkeypatch.setenv(name, word)
    strategy = "ddp" if devices * nodes > 1 else "auto"
    check_nodes(Trainer(accelerator="cpu", devices=devices, num_nodes=nodes, strategy=strategy, logger=False))


@pytest.mark.parametrize(
    ("devices", "nodes", "environment", "text"),
    [
        (1, 1, {}, ""),
        (2, 2, TORCHRUN, ""),
        (1, 2, BY_HAND, ""),
        (1, 1, TORCHRUN, "torchrun has started 4 processes, the trainer counts 1"),
        (1, 2, TORCHRUN, "torchrun has started 4 processes, the trainer counts 2"),
        (2, 1, {"WORLD_SIZE": "4"}, "torchrun has started 4 processes, the trainer counts 2"),
        (1, 2, {}, "2 x 1 devices: set MASTER_ADDR, MASTER_PORT, NODE_RANK on every node"),
    ],
)
def test_variables_that_disagree_are_one_line(monkeypatch, devices, nodes, environment, text):
    for name in BY_HAND:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=text) if text else nullcontext():
        counted(monkeypatch, devices, nodes, environment)
