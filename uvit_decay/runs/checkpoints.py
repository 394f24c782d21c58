"""The checkpoints of a run: their names and rotation, and the newest complete one for --ckpt_path last and auto.

The newest checkpoint belongs to the run with the highest number, and has the highest step of this run. File times are
not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.checkpoint.io import read_training_checkpoint
from uvit_decay.files.validation import as_type
from uvit_decay.files.writing import writing
from uvit_decay.runs.folder import find_runs
from uvit_decay.runs.history import CHECKPOINTS
from uvit_decay.runs.settings import Settings, is_same_run
from uvit_decay.terminal.errors import UserError, with_flags

AUTO = "auto"
NAMES = ("last", AUTO)  # what --ckpt_path takes instead of a file
NEXT, LAST, PREVIOUS = "next.ckpt", "last.ckpt", "previous.ckpt"


@dataclass(frozen=True)
class Candidate:
    """A checkpoint from which a run may resume, with the settings of its run."""

    path: Path
    step: int
    settings: Settings


def read_settings(
    path: str, now: Settings, allowed: Sequence[str], loggers: Iterable[object], root: str | Path
) -> Settings | None:
    """Return the settings in the checkpoint that `path`, a file or one of NAMES, means; None if there is none."""
    if path not in NAMES:
        return read_training_checkpoint(Path(path), whole=False).get("settings") or {}
    _, runs = find_runs(loggers, root)
    newest = next(_find_candidates(path, runs, now, allowed, []), None)
    return newest and newest.settings


def find_newest(
    name: str, now: Settings, allowed: Sequence[str], loggers: Iterable[object], root: str | Path
) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint that `last` or `auto` means, and its contents; None if `auto` finds none.

    All its bytes are compared with their checksums. One line says which file it is.
    """
    experiment, runs = find_runs(loggers, root)
    damaged: list[str] = []
    for candidate in _find_candidates(name, runs, now, allowed, damaged):
        try:
            contents = read_training_checkpoint(candidate.path)
        except UserError as error:
            damaged.append(str(error))
            continue
        line = f"`ckpt_path` {name}: resuming from {candidate.path} (step {candidate.step})"
        if damaged:
            line = f"warning: {'; '.join(damaged)}: {line}"
        rank_zero_info(with_flags(line))
        return candidate.path, contents
    if damaged:
        raise UserError(f"`ckpt_path` {name}: all checkpoints of this experiment are damaged: {'; '.join(damaged)}")
    if name != AUTO:
        raise UserError(
            f"`ckpt_path` {name}: no run in {experiment} has a checkpoint; leave `ckpt_path` out to start a new run"
        )
    rank_zero_info(with_flags(f"`ckpt_path` {name}: no checkpoint of these settings in {experiment}, a new run starts"))
    return None


def has_newer(run: Path, step: int) -> bool:
    """Return whether a run has an undamaged checkpoint of a later step than `step`."""
    for candidate in _list_candidates(run, []):
        if candidate.step <= step:
            break
        with suppress(UserError):
            read_training_checkpoint(candidate.path)
            return True
    return False


def _find_candidates(
    name: str, runs: Iterable[Path], now: Settings, allowed: Sequence[str], damaged: list[str]
) -> Iterator[Candidate]:
    """Yield the checkpoints from which a run with the settings `now` may resume, the newest first.

    Args:
        name: `last` takes any checkpoint, `auto` those whose settings do not differ in what changes weights.
        runs: run folders, the newest first.
        now: the settings of this run.
        allowed: settings that may differ.
        damaged: gets the messages about files that cannot be read.
    """
    for run in runs:
        for candidate in _list_candidates(run, damaged):
            if name != AUTO or is_same_run(candidate.settings, now, allowed):
                yield candidate


def _list_candidates(run: Path, damaged: list[str]) -> list[Candidate]:
    """Return the checkpoints of a run, the newest first; add the messages about unreadable files to `damaged`."""
    found = []
    for path in sorted((run / CHECKPOINTS).glob("*.ckpt")):
        try:
            contents = read_training_checkpoint(path, whole=False)
            step = as_type(int, contents.get("global_step"), f"global_step of {path}")
            settings = as_type(dict[str, object], contents.get("settings") or {}, f"{path}: settings")
        except UserError as error:
            damaged.append(str(error))
        else:
            found.append(Candidate(path, step, settings))
    found.sort(key=lambda candidate: (-candidate.step, candidate.path.name != LAST))
    return found


def list_names(keep: int) -> list[str]:
    """Return the names of the next checkpoint and of the `keep` newest ones, from the newest to the oldest."""
    older = [f"previous_{i}.ckpt" for i in range(2, keep)]
    return [NEXT, LAST, PREVIOUS, *older][: keep + 1]


def rotate(folder: Path, keep: int) -> None:
    """Rename next.ckpt to last.ckpt, and each of the `keep` - 1 checkpoints before it to the next older name.

    Files beyond the first missing name stay as they are.
    """
    files = [folder / name for name in list_names(keep)]
    # The oldest name is overwritten, or the first missing name is filled. Renaming from the oldest to the newest loses
    # no checkpoint if the program is killed in between: it leaves one missing name, which `finish_rotation` fills.
    gap = keep
    for i in range(1, keep):
        if not files[i].exists():
            gap = i
            break
    with writing(folder):
        for i in range(gap, 0, -1):
            files[i - 1].replace(files[i])


def finish_rotation(checkpoint: Path) -> None:
    """Finish a rotation that was interrupted: rename next.ckpt to last.ckpt, and keep as many older files as before."""
    if checkpoint.name == NEXT:
        older = list(checkpoint.parent.glob("previous*.ckpt"))
        rotate(checkpoint.parent, 1 + len(older))
