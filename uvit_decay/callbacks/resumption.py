"""--ckpt_path last and auto: rank 0 finds the newest whole checkpoint of the experiment, and all ranks use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from socket import gethostname

from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from uvit_decay.callbacks.claim import Claim
from uvit_decay.callbacks.run_log import makes_folders
from uvit_decay.checkpoint import read_training_checkpoint
from uvit_decay.checkpoint.newest import Newest, newest_settings, newest_whole, run_folders
from uvit_decay.runtime.errors import UserError
from uvit_decay.tasks.base import Task
from uvit_decay.tasks.settings import Settings, same_run

LAST, AUTO = "last", "auto"
NAMES = (LAST, AUTO)  # what a path may be in place of a file
Begin = Callable[[Path | None], None]


def runs_of(loggers: Iterable[object], root: str | Path) -> tuple[Path, list[Path]]:
    """Return the folder of an experiment and its run folders, the newest first.

    Without a logger that makes run folders both are `root`.
    """
    for logger in loggers:
        if makes_folders(logger):
            return Path(logger.root_dir), run_folders(Path(logger.root_dir))
    return Path(root), [Path(root)]


def settings_before(
    path: str, now: Settings, allowed: Sequence[str], loggers: Iterable[object], root: str | Path
) -> Settings | None:
    """Return the settings in the checkpoint that `path`, a file or one of NAMES, means; None if there is none."""
    if path in NAMES:
        return newest_settings(runs_of(loggers, root)[1], partial(goes_on, path, now, allowed))
    return read_training_checkpoint(Path(path), whole=False).get("settings") or {}


def goes_on(name: str, now: Settings, allowed: Sequence[str], before: Settings) -> bool:
    """Return whether a run of the settings `now` may go on from a checkpoint of those `before`; `last` takes any."""
    return name == LAST or same_run(before, now, allowed)


def by_name(trainer: Trainer, begin: Begin = lambda path: None) -> Trainer:
    """Let `trainer.fit(..., ckpt_path=...)` take `last` and `auto`, and lock the run folder; return the trainer.

    Args:
        trainer: a trainer that has not begun.
        begin: called on all ranks with the checkpoint that was found, None for a new run; may raise a UserError, which
            then ends all ranks.
    """
    claim = Claim()
    trainer._checkpoint_connector = _ByName(trainer, begin, claim)
    trainer.callbacks.append(claim)
    return trainer


class _ByName(_CheckpointConnector):
    """Lightning's selection of the checkpoint, in which `last` and `auto` have the meaning of this project.

    Lightning's own `last` means that of a ModelCheckpoint, and without one it would begin a new run. This is where it
    selects, since only here the processes exist that a launcher starts, and no run folder yet.
    """

    def __init__(self, trainer: Trainer, begin: Begin, claim: Claim) -> None:
        super().__init__(trainer)
        self._begin, self._claim = begin, claim

    def _select_ckpt_path(
        self, state_fn: TrainerFn, ckpt_path: _PATH | None, model_provided: bool, model_connected: bool
    ) -> _PATH | None:
        self.trainer.strategy.setup_environment()  # the process group; Lightning calls this again to no effect
        if ckpt_path in NAMES:
            ckpt_path = self._newest(str(ckpt_path))
        ckpt_path = super()._select_ckpt_path(state_fn, ckpt_path, model_provided, model_connected)
        if state_fn == TrainerFn.FITTING:
            self._claim.take(self.trainer)
        return ckpt_path

    def _newest(self, name: str) -> Path | None:
        """Return the newest checkpoint, None if `auto` finds none."""
        found = self._agreed(name)
        self._try(found)
        return found.path if found else None

    def _agreed(self, name: str) -> Newest | None:
        """Return what rank 0 finds, or raise a UserError, on all ranks."""
        broadcast = self.trainer.strategy.broadcast
        found, problem = broadcast(self._found(name) if self.trainer.is_global_zero else (None, ""))
        if problem:
            raise UserError(problem)
        return found

    def _try(self, found: Newest | None) -> None:
        """Begin with the checkpoint; raise a UserError on all ranks if any of them cannot use it."""
        failure = None
        try:
            if found:
                _check_shared(found)
            self._begin(found.path if found else None)
        except UserError as error:
            failure = error
        if self.trainer.strategy.reduce_boolean_decision(failure is not None, all=False):
            where = found.path if found else "the new run"
            raise failure or UserError(f"{where}: another process cannot use it, whose error says why")

    def _found(self, name: str) -> tuple[Newest | None, str]:
        """Find the checkpoint on rank 0 and say which it is; return it, or an error."""
        trainer = self.trainer
        task: Task = trainer.lightning_module
        where, runs = runs_of(trainer.loggers, trainer.default_root_dir)
        try:
            found = newest_whole(runs, partial(goes_on, name, task.settings, task.allowed))
        except UserError as error:
            return None, f"--ckpt_path {name}: {error}"
        if found is None and name == LAST:
            reason = f"there is no checkpoint of a run in {where}: leave it out to start a new run"
            return None, f"--ckpt_path last: {reason}"
        rank_zero_info(_said(name, found, where))
        return found, ""


def _check_shared(found: Newest) -> None:
    """Raise a UserError if this process does not see the file that rank 0 has chosen."""
    path = found.path
    if not (path.is_file() and read_training_checkpoint(path, whole=False)["global_step"] == found.step):
        raise UserError(
            f"{path.absolute()} on {gethostname()} is not the file that the first process has chosen: all nodes need "
            "one folder of runs, on a file system that they share"
        )


def _said(name: str, found: Newest | None, where: Path) -> str:
    if found is None:
        return f"--ckpt_path {name}: a new run starts: there is no checkpoint of these settings in {where}"
    goes_on = f"going on from {found.path} (step {found.step})"
    if found.damaged:
        return f"warning: {'; '.join(found.damaged)}: --ckpt_path {name} is {goes_on}"
    return f"--ckpt_path {name}: {goes_on}"
