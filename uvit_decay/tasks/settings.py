"""The settings of two runs, by flag: which differ, and which of them decide how the training goes on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from uvit_decay.checkpoint.card import ModelCard
from uvit_decay.runtime.instantiate import renamed
from uvit_decay.tasks.optimization import Optimization

Settings = Mapping[str, Any]  # values by flag without dashes: {"model.optim.lr": 1e-4}

MISSING = "nothing"
# Defaults of options that runs of before did not know.
OPTIM = {f"model.optim.{field.name}": field.default for field in dataclasses.fields(Optimization)}
LATER = OPTIM | {"model.net.qk_norm": False, "model.net.norm_type": "layer"}
LATER |= {"trainer.callbacks.EMA.extra_decays": [], "trainer.callbacks.LastCheckpoint.keep_last": 2}
# Of the settings of the trainer only these change what the network learns, and how its weights are averaged. Precision
# is a matter of the devices, as the order of sums is.
TRAINER = re.compile(
    r"trainer\.(gradient_clip_\w+|limit_train_batches|overfit_batches|sync_batchnorm|callbacks\.EMA\b.*)"
)
# And these of the others do not: where the data are and how they are read, what only looks, how a network began.
FREE = re.compile(
    r"data\.(path|test_path|download|num_workers|device_batch_size|memory_gb|verify|test_crop)"
    r"|model\.(compile|init_from|optim\.skip_non_finite|sampling\b.*|net\.(init|zero_init|skip_zero_init|checkpointing))"
)


def decides(name: str) -> bool:
    """Return whether a setting decides how training goes on; length and devices of the run, for example, do not."""
    return bool(TRAINER.fullmatch(name)) if name.startswith("trainer.") else not FREE.fullmatch(name)


def same_run(before: Settings, now: Settings) -> bool:
    """Return whether a run of the settings `now` is one of `before` that goes on.

    Without settings, as in runs that another program than train.py started, there is nothing to compare.
    """
    return not (before and now and any(decides(name) for name in different(renamed(before), now)))


def different(before: Settings, now: Settings) -> list[str]:
    """Return the names of settings that differ; what `before` does not know has the default of then."""
    before = completed(before, now)
    return [name for name in {**before, **now} if before.get(name, MISSING) != now.get(name, MISSING)]


def completed(before: Settings, now: Settings) -> Settings:
    """Return settings with the defaults of options that their run did not know."""
    return {**{name: value for name, value in LATER.items() if name in now}, **before}


def plain(value: Any) -> Any:
    """Return a tuple as the list that YAML makes of it, and anything else as it is."""
    return list(value) if isinstance(value, tuple) else value


def changes(contents: Mapping[str, Any], card: ModelCard, settings: Settings, least: Settings) -> str:
    """Return one line with all settings that differ from those of the run that wrote a checkpoint; empty if none does.

    Args:
        contents: contents of the checkpoint.
        card: its model card.
        settings: settings of this run; empty if they are not known.
        least: `lr`, `betas`, `weight_decay` and `data` of this run; compared with the checkpoint's optimizer and data
            if it or this run has no settings.
    """
    before, now = renamed(contents.get("settings")), settings
    if not (before and now):
        group = contents["optimizer_states"][0]["param_groups"][0]
        before = {**group, "lr": group["initial_lr"], "data": card.data}
        before, now = {name: plain(before[name]) for name in least}, least
    before = completed(before, now)
    names = different(before, now)
    return ", ".join(f"{name} {now.get(name, MISSING)} (was {before.get(name, MISSING)})" for name in names)
