"""`train.py doctor`: the command line of `fit`, which checks the run instead of training it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import torch.distributed as dist
from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities import rank_zero_only

from uvit_decay.callbacks.resumption import AUTO, NAMES
from uvit_decay.commands.cli import CLI
from uvit_decay.doctor import Finding, Report, Run
from uvit_decay.doctor.examine import examine
from uvit_decay.runtime.errors import RunEnded, UserError

COMMAND, JSON = "doctor", "--json"
# What a rehearsal does without: it writes nothing, validates nothing, and ends when it has seen enough.
LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric")
PRACTICE = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "min_steps": None,
    "min_epochs": None,
    "max_time": None,
    "profiler": None,
    "fast_dev_run": False,
}


class Doctor(CLI):
    """LightningCLI that parses the flags of `fit`, builds what they say, and prints findings in place of training."""

    begun = 0  # step of the checkpoint

    def parse_arguments(self, parser: LightningArgumentParser, args: list[str]) -> None:
        """Parse the arguments as those of `fit`; Lightning starts further processes with the original ones."""
        self._json = JSON in args
        super().parse_arguments(parser, ["fit", *(word for word in args[1:] if word != JSON)])

    def before_instantiate_classes(self) -> None:
        self._levels = {logger: logger.level for logger in map(logging.getLogger, LOGGERS)}
        for logger in self._levels:
            logger.setLevel(logging.ERROR)  # they speak of the trainer, which nobody will use
        self.report = Report(rank_zero_only.rank == 0, self._json)
        places = list(_places(self._get(self.config, "trainer")))
        self._missing = [path for place in places for path in (place, *place.parents) if not path.exists()]
        super().before_instantiate_classes()

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except UserError as error:
            self._end(Finding("error", "configuration", str(error)))

    def before_fit(self) -> None:
        name = self.config.fit.ckpt_path
        try:
            super().before_fit()
            if name in NAMES:
                found = self.config_init.fit.ckpt_path
                text = f"it would resume from {found}" if found else "a new run, there is no checkpoint to resume from"
                self.report.add([Finding("ok", "start", f"--ckpt_path {name}: {text}")])
        except UserError as error:
            done = isinstance(error, RunEnded) and name == AUTO  # `fit` does nothing, and exits with 0
            self._end(Finding("note" if done else "error", "start", str(error)))

    def _check_fits(self, path: str | Path) -> int:
        self.begun = super()._check_fits(path)
        return self.begun

    def fit(
        self,
        model: LightningModule,
        datamodule: LightningDataModule,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Examine the run; LightningCLI calls this in place of the trainer's method."""
        run = Run(self.trainer, model, datamodule, model.settings, self.begun)
        with TemporaryDirectory() as folder:

            def practice(callbacks: list[Callback]) -> Trainer:
                options = {**PRACTICE, "default_root_dir": folder, "callbacks": callbacks}
                return self.instantiate_trainer(**options)

            self.save_config_callback = None
            examine(run, self.report, practice)
        if dist.is_initialized() and not self.report.errors:
            dist.barrier()  # a process that is faster would take the group from the others
        if code := self._close():
            sys.exit(code)

    def _end(self, finding: Finding) -> NoReturn:
        """Close the report with this finding, without which nothing else can be checked, and exit."""
        self.report.add([finding])
        sys.exit(self._close())

    def _close(self) -> int:
        """Close the report, remove folders that the loggers have made, and return the exit code."""
        for logger, level in self._levels.items():
            logger.setLevel(level)
        for path in sorted(self._missing, key=lambda path: -len(path.parts)):
            with suppress(OSError):  # not empty, or another rank was faster
                path.rmdir()
        code = self.report.close()
        sys.stdout.flush()
        return code


def _places(trainer: Namespace) -> Iterator[Path]:
    """Yield the folders that a trainer of this configuration may make."""
    loggers = trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]
    for arguments in (logger.get("init_args") for logger in loggers if isinstance(logger, Namespace)):
        if arguments and arguments.get("save_dir"):
            name = arguments.get("experiment") or arguments.get("name") or ""
            yield Path(os.path.abspath(arguments["save_dir"]), name)
    if trainer.default_root_dir:
        yield Path(os.path.abspath(trainer.default_root_dir))
