"""Auxiliary losses: further objectives on the token states of the network that a task trains.

    loss of a step = loss of the task + sum over auxiliary losses of weight * loss

One forward pass gives the output of the network and the states. `train/loss` and `val/loss` stay the loss of the task;
each auxiliary loss is logged, without its weight, as train/aux/NAME.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any

from jaxtyping import Float
from torch import Tensor, nn

from uvit_decay.data.batches import Batch
from uvit_decay.data.datamodule import ImageData
from uvit_decay.nn.intermediates import layer_indices
from uvit_decay.tasks.loader_data import LoaderData
from uvit_decay.terminal.typed import Within, check_types

PREFIX = "train/aux/"  # of names in logs


@check_types
class AuxiliaryLoss(nn.Module, ABC):
    """Abstract base class of auxiliary losses; a subclass defines `forward`.

    A loss may hold modules of its own, such as a projector. Their parameters are trained with the optimizer of the run,
    stored in its checkpoints and restored on resumption; a frozen module (requires_grad False) is neither trained nor
    stored. Modules that are trained are built in the constructor, or in `bind` if they need the width of the network.

    Args:
        layers: names or indices of the layers whose states `forward` takes, see `layers` of the network; None takes
            all layers.
        weight: factor of this loss in the loss of a step, not negative.

    Attributes:
        num_prefix_tokens: number of tokens at the beginning of each state that are not patches; known after `bind`.
        figures: further scalar tensors of the newest micro-batch by name, logged as train/aux/NAME_FIGURE.
    """

    def __init__(
        self, layers: Sequence[str | int] | None = None, weight: Annotated[float, Within("[0, inf)")] = 1.0
    ) -> None:
        super().__init__()
        self.layers, self.weight = layers, weight
        self.num_prefix_tokens = 0
        self.figures: dict[str, Tensor] = {}

    @property
    def name(self) -> str:
        """Name of this loss in logs, train/aux/NAME; by default the class name in lower case."""
        return type(self).__name__.lower()

    def bind(self, net: nn.Module) -> None:
        """Prepare for a network, with its `dim`, `layers` and `num_prefix_tokens`; the task calls this once.

        A subclass may extend this to choose `layers` by the network and to build modules; it must not keep `net` as an
        attribute.
        """
        self.num_prefix_tokens = net.num_prefix_tokens

    def prepare(self, data: ImageData | LoaderData, images: int) -> None:
        """Raise a UserError if the loss does not fit the data of a run.

        Args:
            data: the data of the run.
            images: number of images of a micro-batch.
        """

    @abstractmethod
    def forward(
        self, states: dict[str, Float[Tensor, "b n d"]], batch: Batch, times: Float[Tensor, " b"] | None
    ) -> Float[Tensor, ""]:
        """Return the loss of a micro-batch, a mean over its images.

        A loss that compares images with one another sees one micro-batch on one device. Under autocast matrix products
        are in bfloat16; a loss that needs float32 uses `torch.autocast(device_type, enabled=False)`.

        Args:
            states: token states (b, n, d) by name of layer, in execution order, for the layers that `layers` names. The
                first `num_prefix_tokens` tokens are not patches. An MAE's states have only its visible patches.
            batch: the micro-batch: `images` float32 (b, c, h, w) in about [-1, 1] without noise, `labels` int64 (b,),
                and `sample_ids`, which key random numbers (`uvit_decay.runtime.random`).
            times: noise levels of the images that the network saw, in [0, 1] with 1 for noise; None for an MAE.
        """


class AuxiliaryLosses(nn.ModuleList):
    """The auxiliary losses of a task, bound to its network.

    Args:
        losses: the losses; none cost nothing.
        net: the network. Its forward takes the argument `layers`, indices into its `layers`, ascending, with which it
            returns (output, token states of these layers).
    """

    def __init__(self, losses: Sequence[AuxiliaryLoss], net: nn.Module) -> None:
        super().__init__()
        self._layer_names: list[str] = []
        self._wanted: list[list[int]] = []  # indices of the layers of each loss
        if losses:
            self._layer_names = [layer.name for layer in net.layers]
        for loss in losses:
            loss.bind(net)
        found: set[int] = set()
        for loss in losses:
            names = None if loss.layers is None else [str(layer) for layer in loss.layers]
            wanted = layer_indices(net.layers, names)
            found.update(wanted)
            self._wanted.append(wanted)
            self.append(loss)
        self.layers = tuple(sorted(found))

    @property
    def names(self) -> list[str]:
        """Names of the losses in logs; a name that another loss has already gets the first number that is free."""
        found: list[str] = []
        for loss in self:
            name = loss.name
            number = 1
            while name in found:
                number += 1
                name = f"{loss.name}_{number}"
            found.append(name)
        return found

    def figures(self) -> dict[str, Tensor]:
        """Return the further figures of all losses for the newest micro-batch, by name in logs."""
        found = {}
        for name, loss in zip(self.names, self, strict=True):
            for figure, value in loss.figures.items():
                found[f"{name}_{figure}"] = value
        return found

    def values(self, states: Sequence[Tensor], batch: Batch, times: Tensor | None) -> dict[str, Tensor]:
        """Return the scalar of each loss by name, without its weight; `states` are the states of `self.layers`."""
        by_index = dict(zip(self.layers, states, strict=True))
        values = {}
        for name, loss, wanted in zip(self.names, self, self._wanted, strict=True):
            given = {self._layer_names[layer]: by_index[layer] for layer in wanted}
            values[name] = loss(given, batch, times)
        return values

    def sum_weighted(self, values: dict[str, Tensor]) -> Tensor:
        """Return the sum of weight * value in float32."""
        total: Tensor | int = 0
        for name, loss in zip(self.names, self, strict=True):
            total = total + loss.weight * values[name].float()
        return total


class Observed:
    """A network that is called as usual, and computes auxiliary losses from its states in each call.

    Args:
        net: the network.
        losses: the auxiliary losses.
        batch: the micro-batch.
        times: noise levels of its images, or None.
    """

    def __init__(self, net: nn.Module, losses: AuxiliaryLosses, batch: Batch, times: Tensor | None) -> None:
        self.net = net
        self.losses = losses
        self.batch = batch
        self.times = times
        self.values: dict[str, Tensor] = {}  # by name of loss, once the network was called

    def __call__(self, *inputs: Any) -> Any:
        output, states = self.net(*inputs, layers=self.losses.layers)
        self.values = self.losses.values(states, self.batch, self.times)
        return output
