"""A step that runs out of memory: one line with the flags that make it smaller."""

import pytest
import torch
from conftest import tiny_net, tiny_task, tiny_trainer
from lightning.pytorch import Callback
from long_runs import TOO_MUCH, ended
from small_mae import small_mae
from small_vit import small_vit

from uvit_decay.data import Digits
from uvit_decay.nn import ResNet
from uvit_decay.runtime.errors import UserError
from uvit_decay.tasks import ClassifyTask, MAETask
from uvit_decay.tasks.memory import is_out_of_memory


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_each_part_of_a_step_says_how_to_make_it_smaller(tmp_path, where, pieces):
    now, smaller = 32 // pieces, 16 // pieces
    assert ended(tmp_path, tiny_task(), where, 32, 32 // pieces) == (
        "cpu is out of memory at step 2 (it tried to allocate 281474976710656 bytes): set "
        f"--data.device_batch_size {smaller} (pieces of {now} images now), which trains the same network; or set "
        "--model.net.checkpointing true, for less memory and more time"
    )


@pytest.mark.parametrize(
    ("batch_size", "device_batch_size", "advice"),
    [
        (33, None, "set --data.device_batch_size 11 (pieces of 33 images now)"),
        (35, 7, "set --data.device_batch_size 1 (pieces of 7 images now)"),
        (3, 1, "bytes): set --model.net.checkpointing true, for less memory and more time; or shard the network over"),
    ],
)
def test_the_smaller_piece_divides_the_share_of_a_device(tmp_path, batch_size, device_batch_size, advice):
    assert advice in ended(tmp_path, tiny_task(), "forward", batch_size, device_batch_size)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: tiny_task(tiny_net(checkpointing=True)), False),
        (lambda: ClassifyTask(ResNet(8, 1, num_classes=10, width=4, pixels="unit")), False),
        (lambda: ClassifyTask(small_vit()), True),
        (lambda: MAETask(small_mae()), True),
    ],
)
def test_recomputation_is_named_where_it_is_not_on(tmp_path, make, named):
    assert ("checkpointing" in ended(tmp_path, make())) == named


def test_other_errors_stay_what_they_are(tmp_path):
    class Wrong(Callback):
        def on_train_batch_start(self, trainer, task, batch, *_) -> None:
            batch.images.resize_(0)

    with pytest.raises((RuntimeError, ValueError)) as error:
        tiny_trainer(tmp_path, Wrong()).fit(tiny_task(), Digits(32))
    assert not isinstance(error.value, UserError)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of ..."),
        RuntimeError("MPS backend out of memory (MPS allocated: 9.06 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
)
def test_lack_of_memory_is_known_on_other_devices(error):
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("Connection closed by peer"))


def test_memory_that_python_lacks_is_lack_of_memory_too():
    with pytest.raises(MemoryError) as error:
        bytes(8 * TOO_MUCH)
    assert is_out_of_memory(error.value)
