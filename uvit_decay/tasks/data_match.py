"""Agreement of a network and its data: image size, channels and number of classes."""

from __future__ import annotations

from torch import nn

from uvit_decay.data.datamodule import ImageData
from uvit_decay.runtime.errors import UserError


def check_match(net: nn.Module, data: ImageData) -> None:
    """Raise a UserError if image size, channels or number of classes of the data are not the network's."""
    required = {"image_size": data.image_size, "channels": data.channels}
    if net.num_classes:
        required["num_classes"] = len(data.class_names)
    of_data, of_net, flags = [], [], []
    for name, value in required.items():
        ours = getattr(net, name)
        if ours != value:
            of_data.append(f"{name} {value}")
            of_net.append(str(ours))
            flags.append(_choose_flags(data, name, value, ours))
    if flags:
        raise UserError(
            f"the data have {', '.join(of_data)}, the network has {', '.join(of_net)}: set {' '.join(flags)}"
        )


def _choose_flags(data: ImageData, name: str, of_data: int, of_net: int) -> str:
    """Return the flags of which either makes network and data agree on `name`.

    The flag of the network comes first: images of another size or in grey are rarely what is wanted.
    """
    of_model = f"--model.net.{name} {of_data}"
    if name not in data.adjustable:
        return of_model
    return f"{of_model} (or --data.{name} {of_net})"
