"""In which precision looks while training sample."""

import pytest
import torch
from conftest import tiny_task, tiny_trainer
from lightning.pytorch import Callback

from uvit_decay.callbacks import LinearProbes, Preview
from uvit_decay.data import Digits
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.runtime.errors import UserError


class OnceSetUp(Callback):
    """Calls `then(trainer, task)` in `setup`, when the network is on the CPU whatever the strategy's device."""

    def __init__(self, then):
        self.then = then

    def setup(self, trainer, task, stage):
        self.then(trainer, task)


def test_tf32_may_be_named_before_the_network_is_on_its_gpu(tmp_path, monkeypatch):
    def on_a_gpu(trainer, task):
        with monkeypatch.context() as patch:
            patch.setattr(trainer.strategy, "_root_device", torch.device("cuda", 0))
            Preview(sampling=Sampling(precision="tf32")).setup(trainer, task, "fit")

    tiny_trainer(tmp_path, OnceSetUp(on_a_gpu), max_steps=1).fit(tiny_task(), Digits(32))
    on_cpu = tiny_trainer(tmp_path, Preview(sampling=Sampling(precision="tf32")), max_steps=1)
    with pytest.raises(UserError, match="precision tf32 is of CUDA GPUs, this device is cpu"):
        on_cpu.fit(tiny_task(), Digits(32))


def test_looks_have_the_precision_of_the_task_unless_they_name_one(tmp_path):
    looks = {
        Preview(sampling=Sampling("ddim")): "bf16",
        Preview(sampling=Sampling("ddim", precision="float32")): "float32",
        Preview(): "bf16",
        LinearProbes(times=(0.1,)): "bf16",
    }

    def compare(trainer, task):
        task.sampling = Sampling(precision="bf16")
        assert [look.sampling_for(task).precision for look in looks] == list(looks.values())

    tiny_trainer(tmp_path, OnceSetUp(compare), max_steps=1).fit(tiny_task(), Digits(32))
