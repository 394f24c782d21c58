"""The argument `compile` of tasks and extractors."""

from __future__ import annotations

import torch

from uvit_decay.runtime.errors import check_choice


def check_compile(compile: bool | str, *others: str) -> None:
    """Raise a UserError unless `compile` is a bool, the name of a backend of torch.compile, or one of `others`."""
    if isinstance(compile, bool) or compile in others:  # listing the backends imports them, for seconds
        return
    backends = torch.compiler.list_backends(exclude_tags=())
    check_choice(("true", "false", *others, *backends), compile=compile)
