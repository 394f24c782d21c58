"""LightningCLI, wired for this project: what train.py runs."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from uvit_decay import callbacks, nn  # noqa: F401  their classes can then be named without their modules
from uvit_decay.checkpoint import read_training_checkpoint
from uvit_decay.data import ImageData
from uvit_decay.disk import check_writable
from uvit_decay.errors import UserError
from uvit_decay.evaluation.runs import flat
from uvit_decay.tasks import Task
from uvit_decay.tasks.resume import check
from uvit_decay.tasks.sharding import Sharded, spare_copies

SHARDING = ("fsdp", "deepspeed", "modelparallel")  # in the names of strategies
# What is kept in a checkpoint, and compared when a run goes on.
EXPERIMENT = ("seed_everything", "model.", "data.", "trainer.")
SEED_FLAGS = ("--model.seed", "--model.init_args.seed", "--data.seed", "--data.init_args.seed")


class Parser(LightningArgumentParser):
    """Reports a wrong option or config key in one line instead of a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(_gist(message)) from ex


def _gist(message: str) -> str:
    """jsonargparse explains a wrong nested option by all alternatives that it tried; keep what was wrong."""
    lines = [line.strip(" -").replace("Parser key ", "") for line in message.splitlines()]
    tried = lines.index("Errors:") if "Errors:" in lines else -1
    reasons = [line for line in lines[tried + 1 :] if line and "'NoneType'" not in line and "Given value" not in line]
    where = lines[0].partition(":")[0] + ": " if tried > 0 else ""
    return where + " ".join(reasons)


def _hush() -> None:
    """Leave out what a user of this project can do nothing about."""
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")  # Lightning's use of torch
    advertisements = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    advertisements.addFilter(lambda record: "Tip: For seamless" not in record.getMessage())


class CLI(LightningCLI):
    """One seed for everything, and flags win over what a checkpoint was trained with."""

    @classmethod
    def run(cls) -> None:
        """Run the subcommand that sys.argv names."""
        for arg in sys.argv:
            if arg.partition("=")[0] in SEED_FLAGS:
                raise UserError(f"{arg}: there is one seed, --seed_everything")
        _hush()
        spare_copies()
        torch.set_float32_matmul_precision("high")  # TF32 on GPUs; nothing changes on the CPU
        try:
            cls(
                Task,
                ImageData,
                subclass_mode_model=True,
                subclass_mode_data=True,
                seed_everything_default=0,
                auto_configure_optimizers=False,
                parser_class=Parser,
                save_config_kwargs={"overwrite": True},
            )
        except MisconfigurationException as error:
            raise UserError(" ".join(str(error).split())) from error

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """What our tasks can do: fit, and validate (the loss of a checkpoint on the test set)."""
        offered = LightningCLI.subcommands()
        return {name: offered[name] for name in ("fit", "validate")}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("seed_everything", "model.init_args.seed")
        parser.link_arguments("seed_everything", "data.init_args.seed")

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse, and check what Lightning would only find later."""
        super().parse_arguments(parser, args)
        config = self.config[self.config.subcommand]
        if config.seed_everything < 0:
            raise UserError(f"--seed_everything takes a number from 0, got {config.seed_everything}")
        strategy = config.trainer.strategy
        if strategy != "fsdp" and any(word in str(strategy).lower() for word in SHARDING):
            raise UserError(f"--trainer.strategy {strategy}: fsdp is the one that shards here; ddp does not shard")
        if str(config.trainer.precision) not in ("None", "32", "32-true", "bf16-mixed"):
            raise UserError(f"--trainer.precision {config.trainer.precision}: train in 32-true or bf16-mixed")

    def before_instantiate_classes(self) -> None:
        """Where nothing is asked for, train in bf16-mixed on GPUs that have it, and in float32 elsewhere.

        A CPU without bf16 instructions would be three times slower in it.
        """
        trainer = self._get(self.config, "trainer")
        on_gpu = trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
        if trainer.precision is None and on_gpu and torch.cuda.is_bf16_supported():
            trainer.precision = "bf16-mixed"

    def instantiate_classes(self) -> None:
        """jsonargparse buries an error of a constructor in a list of the alternatives that it tried."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, UserError):
                cause = cause.__cause__
            raise (cause or error) from None

    def instantiate_trainer(self, **options: Any) -> Trainer:
        """A flag that Lightning refuses is the user's to mend; `fsdp` is ours, here and not in the saved config."""
        if self._get(self.config, "trainer").strategy == "fsdp":
            options["strategy"] = Sharded()
        try:
            trainer = super().instantiate_trainer(**options)
        except (MisconfigurationException, ModuleNotFoundError, ValueError) as error:
            raise UserError(" ".join(str(error).split())) from error
        for folder in [logger.save_dir for logger in trainer.loggers] or [trainer.default_root_dir]:
            if folder is not None:
                check_writable(Path(folder), folder=True)
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Lightning would let the hyper-parameters of a checkpoint override the command line."""

    def before_fit(self) -> None:
        """Find a bad --ckpt_path before any work."""
        self.model.settings = self._settings()
        if self.config.fit.ckpt_path is not None:
            self._check_fits(self.config.fit.ckpt_path)

    def before_validate(self) -> None:
        """The same, and without a checkpoint there is nothing to measure."""
        self.model.settings = self._settings()
        if self.config.validate.ckpt_path is None:
            raise UserError("validate needs --ckpt_path runs/.../last.ckpt")
        self._check_fits(self.config.validate.ckpt_path)

    def _check_fits(self, path: str) -> None:
        contents = read_training_checkpoint(Path(path))
        check(contents, self.model, self.trainer, path)
        self.model.load_state_dict(contents["state_dict"])  # which refuses another decay

    def _settings(self) -> dict[str, Any]:
        """All that this run depends on, flat."""
        text = self._parser(self.subcommand).dump(self.config[self.subcommand])
        return {name: value for name, value in flat(yaml.safe_load(text)) if name.startswith(EXPERIMENT)}
