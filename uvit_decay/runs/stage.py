"""The stage of a training at which samples are no result yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EARLY = 300  # optimizer steps; until then, samples of networks that began from noise show nothing


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
