"""The comparison of a block on a device with the block on the CPU."""

import pytest
import torch
from conftest import tiny_net, tiny_task, tiny_trainer
from small_mae import mae_task
from small_vit import fine_tuning
from torch import nn

from uvit_decay.data import Digits
from uvit_decay.doctor import Run
from uvit_decay.doctor.backend import block_differences, check_backend, compare_with_cpu
from uvit_decay.nn import SiT

CPU = torch.device("cpu")
TASKS = {
    "UViT": tiny_task,
    "SiT": lambda: tiny_task(SiT(8, 2, 1, dim=16, depth=2, heads=2, num_classes=10)),
    "attention over depth": lambda: tiny_task(tiny_net(schedule="attnres", alpha_min=1.0)),
    "MAE": mae_task,
    "ViT": fine_tuning,
}


@pytest.mark.parametrize("name", TASKS)
def test_a_device_that_computes_as_the_cpu_agrees_with_it(name):
    task = TASKS[name]()
    before = {key: value.clone() for key, value in task.net.state_dict().items()}
    finding = compare_with_cpu(task, CPU)
    assert (finding.level, finding.text.split()[-1]) == ("ok", "0")
    assert all(torch.equal(value, before[key]) for key, value in task.net.state_dict().items())


class Faulty(nn.Module):
    """A module whose calls after the first `right` ones are wrong: in the gradient of a parameter, or with NaN."""

    right = 1

    def __init__(self, fault: str, width: int) -> None:
        super().__init__()
        self.fault = fault
        self.scale, self.shift = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Faulty.right -= 1
        scale = self.scale
        if Faulty.right < 0:
            scale = scale * torch.nan if self.fault == "nan" else 2 * scale - scale.detach()
        return x * scale + self.shift


def test_a_difference_has_a_name_and_a_size(monkeypatch):
    monkeypatch.setattr(Faulty, "right", 1)
    found = block_differences(Faulty("gradient", 4), [torch.ones(2, 4)], {}, CPU)
    assert found == {
        "output": 0.0,
        "gradient of parameter scale": 1.0,  # twice the right one
        "gradient of parameter shift": 0.0,
        "gradient of argument 0": 0.0,
    }


@pytest.mark.parametrize(("fault", "named"), [("gradient", "scale (1)"), ("nan", "output (nan)")])
def test_a_block_that_differs_is_an_error_that_names_what_differs(fault, named, monkeypatch):
    monkeypatch.setattr(Faulty, "right", 2)  # the network's own call, and the call on the CPU
    monkeypatch.setattr("uvit_decay.doctor.backend.layer_blocks", lambda net: [net.in_blocks[0].mlp])
    task = tiny_task()
    task.net.in_blocks[0].mlp = Faulty(fault, 16)
    finding = compare_with_cpu(task, CPU)
    assert finding.level == "error"
    assert "in_blocks.0.mlp" in finding.text
    assert named in finding.text
    assert "shift" not in finding.text
    assert "--trainer.accelerator cpu" in finding.flag


def test_a_run_on_a_cpu_has_nothing_to_compare(tmp_path):
    assert list(check_backend(Run(tiny_trainer(tmp_path), tiny_task(), Digits(32)))) == []
