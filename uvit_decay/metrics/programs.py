"""Networks in files that are programs: TorchScript archives and the .pt2 files of torch.export."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uvit_decay.runtime.errors import UserError, one_line

Program = Callable[[Tensor], Any]


def load_program(path: Path, device: torch.device) -> Program:
    """Load a TorchScript archive or torch.export's .pt2 onto `device`; raise a UserError if the file is neither."""
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
