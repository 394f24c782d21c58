"""The stage of a training at which samples are no result yet: noise, or images without the class asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uvit_decay.checkpoint.io import read_training_checkpoint
from uvit_decay.runs import history
from uvit_decay.runs.history import GENERATION, run_of

EARLY = 300  # optimizer steps; until then, samples of networks that began from noise show nothing
CONSISTENCY = "label_consistency"  # among the values of GENERATION
ERRORS = 2.0  # standard errors


def describe_early(step: int, settings: Mapping[str, Any]) -> str:
    """Return the remark on samples of a network that has hardly been trained.

    Args:
        step: its optimizer steps.
        settings: settings of the run by flag; a network that started from trained weights generates no noise.
    """
    shown = "show no class" if settings.get("model.init_from") else "are noise"
    return f"trained for {step} step{'s' * (step != 1)}: samples {shown} at this stage"


def is_early(step: int, settings: Mapping[str, Any]) -> bool:
    """Return whether a network has hardly been trained; one that started from trained weights has been.

    Args:
        step: its optimizer steps.
        settings: settings of the run by flag.
    """
    return step < EARLY and not settings.get("model.init_from")


def finds_no_class(consistency: float, classes: int, samples: int) -> bool:
    """Return whether a classifier recognises the classes of samples no better than by chance.

    Args:
        consistency: share of the samples that have their class; NaN if unknown.
        classes: number of classes.
        samples: number of samples.
    """
    chance = 1 / classes
    error = math.sqrt(chance * (1 - chance) / samples)
    return consistency <= chance + ERRORS * error


def remark_on(checkpoint: Path, step: int, classes: int) -> str:
    """Return a remark if samples of a checkpoint are noise, otherwise an empty text; only runs are known.

    Args:
        checkpoint: the file.
        step: its optimizer step.
        classes: number of classes of its network.
    """
    if checkpoint.suffix != ".ckpt":
        return ""
    settings = read_training_checkpoint(checkpoint, whole=False).get("settings") or {}
    if is_early(step, settings) or _found_no_class(checkpoint, step, classes):
        return describe_early(step, settings)
    return ""


def _found_no_class(checkpoint: Path, step: int, classes: int) -> bool:
    """Return whether the run of a checkpoint has measured at its step that samples show no class."""
    run = run_of(checkpoint)
    if run is None or classes < 2:
        return False
    for measurement in history.read(run / GENERATION):
        consistency, count = measurement.values.get(CONSISTENCY), measurement.metadata.get("n")
        if measurement.step == step and consistency is not None and isinstance(count, int):
            return finds_no_class(consistency, classes, count)
    return False
