"""Weights of extractors in files of other programs; code in the files is not executed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.tensor_files import has_values, load_any


class Network(NamedTuple):
    """A network in error messages: its name, and whose file has its weights."""

    name: str
    owner: str

    def refused(self, path: Path, reason: str) -> UserError:
        """Return the error for a file that does not hold the weights, with the reason."""
        return UserError(f"{path} does not hold {self.owner}'s {self.name} weights: {reason}")


def read_state(path: Path, network: Network) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors or a file of torch.save, floating-point ones as float32; they may be mapped.

    Raises:
        UserError: a file that cannot be read, or holds something else than tensors by name.
    """
    state = load_any(path)[1]
    if not isinstance(state, dict):
        raise network.refused(path, f"it is no state_dict but a {type(state).__name__}")
    for name, value in state.items():
        if not isinstance(name, str) or (isinstance(value, Tensor) and not has_values(value)):
            raise network.refused(path, f"its {str(name)[:60]!r} is no plain tensor with a name")
        if not isinstance(value, Tensor):
            reason = f"a state_dict in a wrapping, {name!r} is a {type(value).__name__}: save the inner one alone"
            raise network.refused(path, reason)
    return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}


def check_state(
    state: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    path: Path,
    network: Network,
    optional: Iterable[str] = (),
) -> None:
    """Raise a UserError unless names, shapes and dtypes are those of `expected` and all values are finite.

    Args:
        state: the tensors of the file `path`.
        expected: those of the network, perhaps on the meta device.
        path: the file.
        network: the network.
        optional: names that may be missing.
    """
    missing = [name for name in expected if name not in state and name not in optional]
    unknown = [name for name in state if name not in expected]
    for names, what in ((missing, "missing"), (unknown, "unknown")):
        if names:
            raise network.refused(path, f"{len(names)} tensors are {what}, the first is {names[0]}")
    for name, value in state.items():
        if value.shape != expected[name].shape:
            raise network.refused(path, f"{name} is {tuple(value.shape)}, not {tuple(expected[name].shape)}")
        if value.dtype != expected[name].dtype:
            raise network.refused(path, f"{name} is {value.dtype}, not {expected[name].dtype}")
        if not value.isfinite().all():
            raise network.refused(path, f"{name} has values that are not finite")
