"""The checkpoints of a run: their names and rotation, and the newest complete one for --ckpt_path last and auto.

The newest checkpoint belongs to the run with the highest number, and has the highest step of this run. File times are
not used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.checkpoint.io import check_ours, open_training_checkpoint
from uvit_decay.files.tensor_files import TorchFile
from uvit_decay.files.validation import as_type
from uvit_decay.files.writing import writing
from uvit_decay.runs.folder import find_runs
from uvit_decay.runs.history import CHECKPOINTS
from uvit_decay.runs.settings import Settings, is_same_run
from uvit_decay.terminal.errors import UserError

AUTO = "auto"
NAMES = ("last", AUTO)  # what --ckpt_path takes instead of a file
NEXT, LAST, PREVIOUS = "next.ckpt", "last.ckpt", "previous.ckpt"
MOST_OPEN = 64  # files


class Checkpoints:
    """Training checkpoints that a run may resume from; each file is opened and unpickled once, and kept until `close`.

    At most MOST_OPEN files are open. Beyond this number the files opened first are closed, and opened again on demand.
    """

    def __init__(self) -> None:
        self._files: dict[Path, TorchFile] = {}

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, path: Path, whole: bool = False) -> dict[str, Any]:
        """Return the contents of a checkpoint of this project, whose tensors are memory-mapped.

        Args:
            path: the file.
            whole: also compare the tensors with their checksums, which reads the whole file.
        """
        file = self._files.get(path)
        if file is None:
            file = open_training_checkpoint(path)
            self._files[path] = file
            if len(self._files) > MOST_OPEN:
                oldest = next(iter(self._files))
                self._files.pop(oldest).close()
        contents = file.read(whole)
        check_ours(contents, path)
        return contents

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()


@dataclass(frozen=True)
class Candidate:
    """A checkpoint from which a run may resume, with the settings of its run."""

    path: Path
    step: int
    settings: Settings


def read_settings(
    path: str,
    now: Settings,
    allowed: Sequence[str],
    loggers: Iterable[object],
    root: str | Path,
    checkpoints: Checkpoints,
) -> Settings | None:
    """Return the settings in the checkpoint that `path`, a file or one of NAMES, means; None if there is none."""
    if path not in NAMES:
        return checkpoints.read(Path(path)).get("settings") or {}
    fits = partial(may_resume, path, now, allowed)
    _, runs = find_runs(loggers, root)
    for candidate in _find_candidates(runs, fits, checkpoints, []):
        return candidate.settings
    return None


def may_resume(name: str, now: Settings, allowed: Sequence[str], before: Settings) -> bool:
    """Return whether a run with the settings `now` may resume from a checkpoint with the settings `before`.

    `name` is `auto` or `last`; `last` takes any checkpoint.
    """
    return name != AUTO or is_same_run(before, now, allowed)


def find_newest(
    name: str,
    now: Settings,
    allowed: Sequence[str],
    loggers: Iterable[object],
    root: str | Path,
    checkpoints: Checkpoints,
) -> Path | None:
    """Return the checkpoint that `last` or `auto` means, and say which it is; None if `auto` finds none.

    All its bytes are compared with their checksums.

    Raises:
        UserError: `last` finds none, or there are checkpoints, but those that fit are all damaged.
    """
    experiment, runs = find_runs(loggers, root)
    damaged: list[str] = []
    for candidate in _find_candidates(runs, partial(may_resume, name, now, allowed), checkpoints, damaged):
        try:
            checkpoints.read(candidate.path, whole=True)
        except UserError as error:
            damaged.append(str(error))
            continue
        line = f"--ckpt_path {name}: resuming from {candidate.path} (step {candidate.step})"
        if damaged:
            line = f"warning: {'; '.join(damaged)}: {line}"
        rank_zero_info(line)
        return candidate.path
    if damaged:
        raise UserError(f"--ckpt_path {name}: all checkpoints of this experiment are damaged: {'; '.join(damaged)}")
    if name != AUTO:
        raise UserError(
            f"--ckpt_path {name}: no run in {experiment} has a checkpoint; leave --ckpt_path out to start a new run"
        )
    rank_zero_info(f"--ckpt_path {name}: no checkpoint of these settings in {experiment}, a new run starts")
    return None


def has_newer(run: Path, step: int, checkpoints: Checkpoints) -> bool:
    """Return whether a run has an undamaged checkpoint of a later step than `step`."""
    for candidate in _list_candidates(run, checkpoints, []):
        if candidate.step <= step:
            break
        with suppress(UserError):
            checkpoints.read(candidate.path, whole=True)
            return True
    return False


def _find_candidates(
    runs: Iterable[Path], fits: Callable[[Settings], bool], checkpoints: Checkpoints, damaged: list[str]
) -> Iterator[Candidate]:
    """Yield the checkpoints whose settings fit, the newest first.

    Args:
        runs: run folders, the newest first.
        fits: whether a run with these settings may be resumed.
        checkpoints: opens the files.
        damaged: gets the messages about files that cannot be read.
    """
    for run in runs:
        for candidate in _list_candidates(run, checkpoints, damaged):
            if fits(candidate.settings):
                yield candidate


def _list_candidates(run: Path, checkpoints: Checkpoints, damaged: list[str]) -> list[Candidate]:
    """Return the checkpoints of a run, the newest first; add the messages about unreadable files to `damaged`."""
    # The files that are probably the newest come last, so that they stay open.
    files = sorted((run / CHECKPOINTS).glob("*.ckpt"), key=lambda path: path.name in (NEXT, LAST, PREVIOUS))
    found = []
    for path in files:
        try:
            contents = checkpoints.read(path)
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
