"""User-provided feature extractors, files that torch runs without their Python code.

n = images, d = features, k = classes. Such a file is a program: TorchScript is confined to torch's operations, but a
file of torch.export may unpickle arbitrary objects, so load trusted files only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uvit_decay.runtime.errors import UserError, one_line

Program = Callable[[Tensor], Any]


def load(path: Path, device: torch.device) -> Program:
    """Load the program of a TorchScript archive or of torch.export's .pt2 onto `device`.

    Raises:
        UserError: the file is neither.
    """
    reasons = []
    for read in (_exported, _scripted) if path.suffix == ".pt2" else (_scripted, _exported):
        try:
            with warnings.catch_warnings(action="ignore"):  # the deprecation of torch.jit
                return read(path, device)
        except Exception as error:  # any type: a reader of the wrong format can fail with any exception
            reasons.append(one_line(error, 100))
    raise UserError(f"{path} is neither a TorchScript archive ({reasons[0]}) nor torch.export's .pt2 ({reasons[1]})")


def _scripted(path: Path, device: torch.device) -> Program:
    module = torch.jit.load(str(path), map_location=device).eval()
    if any(argument.name == "return_features" for argument in module.forward.schema.arguments):
        return lambda images: module(images, return_features=True)  # StyleGAN's files return probabilities by default
    return module


def _exported(path: Path, device: torch.device) -> Program:
    from torch.export import load as load_exported
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(load_exported(path), device).module()


def read_output(output: Any, n: int, path: Path) -> tuple[Tensor, Tensor | None]:
    """Split the output of a program for n images into float32 features (n, d) and logits (n, k) or None.

    Raises:
        UserError: the output is neither float (n, d) nor a pair with float (n, k), or has values that are not finite.
    """
    parts = tuple(output) if isinstance(output, tuple | list) else (output,)
    right = all(isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 2 and len(x) == n for x in parts)
    if len(parts) not in (1, 2) or not right:
        given = ", ".join(f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in parts)
        wanted = f"float ({n}, d) features, or those and float ({n}, k) logits"
        raise UserError(f"{path} must give {wanted} for {n} images, not {given or 'nothing'}")
    if not all(x.isfinite().all() for x in parts):
        raise UserError(f"{path} gives features or logits that are not finite")
    return parts[0].float(), parts[1].float() if len(parts) == 2 else None
