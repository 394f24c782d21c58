"""The command line of train.py: LightningCLI with this project's parser, checks and defaults."""

from __future__ import annotations

import logging
import re
import shlex
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread

from uvit_decay.callbacks import Progress  # imports all callbacks, so that flags may name them without the module
from uvit_decay.callbacks.periodic import list_missing_results
from uvit_decay.commands.train.complete import complete
from uvit_decay.commands.train.flags import find_flag
from uvit_decay.commands.train.help import SUBCOMMANDS
from uvit_decay.commands.train.length import find_steps
from uvit_decay.commands.train.parser import TrainParser, check_nodes, check_values, limit, locate
from uvit_decay.commands.train.words import Given, list_given
from uvit_decay.data import ImageData
from uvit_decay.doctor import Plan
from uvit_decay.doctor.rehearsal import PRACTICE, Measurements
from uvit_decay.files.instantiate import Trusted
from uvit_decay.files.validation import YAML_LOADER, flat
from uvit_decay.files.writing import check_writable
from uvit_decay.nn import ImageNetwork  # noqa: F401  imports all networks, for the same reason
from uvit_decay.runs.checkpoints import AUTO, LAST, NAMES, NEXT, finish_rotation, read_settings
from uvit_decay.runs.folder import makes_folders
from uvit_decay.runs.launch import SaveConfig, go_on
from uvit_decay.runs.lightning_private import set_length
from uvit_decay.runs.log import RunFolder
from uvit_decay.runs.resumable import Start
from uvit_decay.runs.resume import resume
from uvit_decay.runtime.concurrency import keep_freed_memory
from uvit_decay.runtime.distributed import destroy_group, others_needed
from uvit_decay.runtime.precision import FLOAT16, trains_in_bf16
from uvit_decay.tasks import Task
from uvit_decay.tasks.file_digests import digest_files
from uvit_decay.tasks.parallel.ddp import register_ddp
from uvit_decay.tasks.parallel.sharding import Sharded
from uvit_decay.terminal.command_line import Parser as OneLineParser
from uvit_decay.terminal.errors import RunEnded, UserError, explain, name_flags, one_line, with_flags
from uvit_decay.terminal.program import localise

# Prefixes of the settings that are stored in a checkpoint and compared on resumption.
EXPERIMENT = ("seed_everything", "model.", "data.", "trainer.")
# Beginnings of Lightning's messages that nobody can act on; `train.py doctor` names devices, and a stop is announced.
USELESS = re.compile(
    r".*Tip: For seamless|[GT]PU available: |LOCAL_RANK: |`Trainer\.fit` stopped: `max_|\nDetected Key"
)
INSTALL = re.compile(r"`(pip install [^`]+)`")  # in Lightning's message about a missing package
SEED_FLAGS = ("--model.seed", "--model.init_args.seed", "--data.seed", "--data.init_args.seed")


def _hush() -> None:
    """Suppress messages of Lightning and torch that users of this project cannot act on."""
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")  # Lightning's use of torch
    # Lines of the log follow the steps of the run, not of the epoch.
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval")
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"):
        logging.getLogger(name).addFilter(lambda record: not USELESS.match(record.getMessage()))
    shown = threading.excepthook
    # TensorBoard's writing thread keeps its error for the main thread's next flush, which ends the run with one line.
    threading.excepthook = lambda args: None if isinstance(args.thread, _AsyncWriterThread) else shown(args)


class Launch(LightningCLI):
    """A launch of train.py: it parses, completes, builds, starts and fits, in the order of the methods below.

    LightningCLI calls them. There is one seed for everything, and flags take precedence over the settings of a
    checkpoint.

    Args:
        words: the command line.
        began: when the program began, by `time.monotonic()`.
        claims: holds the locks of this program.
    """

    writes = True  # whether the command writes to the run folder

    def __init__(self, words: list[str], began: float, claims: ExitStack) -> None:
        self.words = words
        self.began = began
        self.claims = claims
        self.config: Namespace | None = None  # until the command line is parsed
        self.given: Given = {}  # the settings of the command line
        self.trust_flags = ""  # such as " --trust mine"
        self.measured: Measurements | None = None  # of the rehearsal that found the length of the run by its minutes
        self._digests: dict[str, str] | None = None  # of `digest_files`, from the first dump of the settings
        with name_flags(self._find_flag):
            super().__init__(
                Task,
                ImageData,
                subclass_mode_model=True,
                subclass_mode_data=True,
                seed_everything_default=0,
                auto_configure_optimizers=False,
                parser_class=TrainParser,
                save_config_callback=SaveConfig,
                save_config_kwargs={"save_to_log_dir": False, "claims": claims},
                args=words,
            )

    @classmethod
    def run(cls, words: list[str], began: float | None = None) -> None:
        """Run the subcommand that the words of a command line name.

        Args:
            words: the command line.
            began: when the program began, by `time.monotonic()`; by default now.
        """
        for word in words:
            if word.partition("=")[0] in SEED_FLAGS:
                raise UserError(f"{word}: there is one seed, --seed_everything")
        _hush()
        register_ddp()
        keep_freed_memory()
        torch.set_float32_matmul_precision("high")  # TF32 on GPUs; nothing changes on the CPU
        try:
            with others_needed(), ExitStack() as claims:
                cls(words, time.monotonic() if began is None else began, claims)
        except MisconfigurationException as error:
            raise UserError(" ".join(str(error).split())) from error
        finally:
            destroy_group()

    def _find_flag(self, name: str, frames: Sequence[FrameType]) -> str | None:
        """Return the flag of an argument that a message names; the parser's own errors name flags already."""
        if self.config is None:
            return None
        return find_flag(self.config[self.config.subcommand].as_dict(), name, frames)

    # 1. Parse and complete.

    def subcommands(self) -> dict[str, set[str]]:
        """Return the subcommands that the command line may name; each parser takes a tenth of a small launch."""
        offered = LightningCLI.subcommands()
        named = [name for name in SUBCOMMANDS if name in self.words]
        return {name: offered[name] for name in named or SUBCOMMANDS}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("seed_everything", "model.init_args.seed")
        parser.link_arguments("seed_everything", "data.init_args.seed")
        allowed = "settings that may differ from the checkpoint's, such as [model.optim.lr,data], or all"
        words = "length of the run in minutes, with reading and evaluation; steps and epochs of the command line win"
        parser.add_argument("--minutes", type=float | None, default=None, help=words)
        parser.add_argument("--resume.allow", type=list[str] | str, default=[], help=allowed)

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the command line, check what Lightning would reject only later, and complete the configuration."""
        trust_parser = OneLineParser(add_help=False, allow_abbrev=False)
        trust_parser.add_argument("--trust", action="append", default=[], type=Trusted)
        options, rest = trust_parser.parse_known_args(args)
        limit(options.trust)
        self.trust_flags = "".join(f" --trust {name}" for name in options.trust)
        with explain("a --config is no text file", UnicodeDecodeError):
            self.config = parser.parse_args(locate(rest))
        config = self.config[self.config.subcommand]
        check_values(config)
        self.given = list_given(rest)
        with _explain_instantiation():  # of the data module
            self._opened = complete(config, self.given)

    # 2. Build: task, data, trainer.

    def instantiate_classes(self) -> None:
        """Turn errors of constructors into UserErrors."""
        with _explain_instantiation():
            super().instantiate_classes()

    def after_instantiate_classes(self) -> None:
        """Use the data module that was opened to find its sizes, because it has listed its files."""
        if self._opened is not None:
            self.datamodule = self._opened

    def instantiate_trainer(self, **options: Any) -> Trainer:
        """Add a run folder and our progress bar where the user has none; turn Lightning's errors into UserErrors.

        The saved config keeps `fsdp`, the trainer gets `Sharded`.
        """
        given = {**self._get(self.config_init, "trainer"), **options}
        loggers = as_list(given["logger"])
        if given["strategy"] == "fsdp":
            given["strategy"] = Sharded()
        is_default = given["logger"] in (None, True)  # Lightning's own logger, which makes folders
        if not is_default and not any(map(makes_folders, loggers)):
            data = self._get(self.config, "data.class_path").rpartition(".")[2]
            net = self._get(self.config, "model.init_args.net.class_path").rpartition(".")[2]
            folder = RunFolder(f"{data}_{net}".lower(), given["default_root_dir"] or "runs")
            given["logger"] = [*filter(None, loggers), folder]
        chosen = as_list(given["callbacks"])
        has_bar = any(isinstance(callback, ProgressBar) for callback in chosen)
        if given["enable_progress_bar"] is not False and not has_bar:
            given["callbacks"] = [*filter(None, chosen), Progress()]
        given["precision"] = self._choose_precision(as_list(given["logger"]))
        if self._has_minutes():
            given["max_epochs"] = -1  # Lightning's default would be 1000
        try:
            trainer = super().instantiate_trainer(**given)
        except (MisconfigurationException, ModuleNotFoundError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(" ".join(str(error).split())) from error
        check_nodes(trainer)
        folders = [logger.save_dir for logger in trainer.loggers]
        for folder in folders or [trainer.default_root_dir]:
            if folder is not None:
                check_writable(Path(folder), folder=True, make=False)
        return trainer

    def _choose_precision(self, loggers: list[Any]) -> str | None:
        """Return the precision that is asked for, which is saved; by default bf16-mixed where it is no slower.

        bf16-mixed is no slower on GPUs that support it, and on CPUs with instructions for it: without them it is three
        times slower. None is float32, which GPUs before 2020 get, too: torch only emulates bfloat16 on them.
        """
        trainer = self._get(self.config, "trainer")
        if trainer.precision is not None:
            return trainer.precision
        if trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
            if torch.cuda.is_bf16_supported(including_emulation=False):
                trainer.precision = "bf16-mixed"
            else:
                rank_zero_info(f"32-true: this GPU has no bfloat16; --trainer.precision {FLOAT16} trains in float16")
        elif trainer.accelerator == "cpu" or (trainer.accelerator == "auto" and not torch.accelerator.is_available()):
            trainer.precision = self._choose_cpu_precision(loggers)
        return trainer.precision

    def _choose_cpu_precision(self, loggers: list[Any]) -> str | None:
        """Return the precision of the run that is resumed, or for a new run bf16-mixed if it is faster."""
        path = self._get(self.config_init, "ckpt_path")
        if path:
            root = self._get(self.config_init, "trainer.default_root_dir") or "."
            allowed = as_list(self._get(self.config, "resume.allow"))
            before = read_settings(path, self._dump_settings(), allowed, loggers, root)
            if before is not None and before.get("trainer.precision") != FLOAT16:
                return before.get("trainer.precision")
        width = self._get(self.config, "model").get("init_args.net.init_args.dim")  # of a transformer
        if not isinstance(width, int) or not trains_in_bf16(width):
            return None
        rank_zero_info(
            f"bf16-mixed: this CPU multiplies matrices in bfloat16, the network is {width} wide; "
            "--trainer.precision 32-true for float32"
        )
        return "bf16-mixed"

    # 3. Start: the checkpoint, the run folder, the length.

    def _run_subcommand(self, subcommand: str) -> None:
        """Run fit or validate; --ckpt_path auto ends without error if nothing is left to do."""
        try:
            super()._run_subcommand(subcommand)
        except RunEnded as error:
            start = self.model.start
            if self.trainer.is_global_zero:
                finish_rotation(start.checkpoint)
                last = start.checkpoint.with_name(LAST) if start.checkpoint.name == NEXT else start.checkpoint
                for command in list_missing_results(self.trainer.callbacks, last, start.step, self.datamodule):
                    rank_zero_info(f"a result of step {start.step} is missing: {command}{self.trust_flags}")
            if self.config[subcommand].ckpt_path != AUTO:
                raise
            rank_zero_info(with_flags(f"nothing is left to do: {error}"))

    def _parse_ckpt_path(self) -> None:
        """Do nothing; Lightning would let the hyper-parameters of a checkpoint override the command line."""

    def before_fit(self) -> None:
        """Check --ckpt_path, or load the weights from which a new run starts, before any work."""
        self._resume()
        start = self.model.start
        if self._has_minutes():
            self._set_length(start)
        if start is None:
            self.model.load_initial()
            return
        self.model.init_from = None
        # Ranks may see different folders: if there are several, they agree when the checkpoint is loaded.
        alone = self.trainer.world_size == 1
        is_complete = 0 <= self.trainer.max_steps <= start.step
        if alone and is_complete:
            raise RunEnded(f"the checkpoint is at step {start.step}, the end: set `max_steps` higher to resume")

    def before_validate(self) -> None:
        """Check --ckpt_path before any work; it is required here."""
        if self.config.validate.ckpt_path in (None, AUTO):
            raise UserError("validate needs --ckpt_path runs/.../last.ckpt, or --ckpt_path last")
        self._resume()

    def _resume(self) -> None:
        """Tell the task its settings and, once it is checked, the checkpoint from which it resumes.

        Lightning is given the file that `last` and `auto` mean.
        """
        chosen = self._get(self.config_init, "ckpt_path")
        task = self.model
        task.settings = self._dump_settings()
        task.trust_flags = self.trust_flags
        task.allowed = as_list(self._get(self.config, "resume.allow"))
        claims = self.claims if self.writes else None
        trains = self.subcommand == "fit"
        task.start = resume(task, self.trainer, self.datamodule, chosen, trains, claims)
        if self.writes and task.start is not None and task.start.run is not None:
            go_on(self.trainer, task.start)
        logger = next(filter(makes_folders, self.trainer.loggers), None)
        if self.writes and logger is not None:
            self.datamodule.find_run_folder = lambda: Path(logger.log_dir)  # makes the folder of a new run
        if chosen in NAMES:
            self.config_init[self.subcommand].ckpt_path = task.start and task.start.checkpoint

    def _has_minutes(self) -> bool:
        """Return whether the length of the run is given in minutes; steps or epochs take precedence."""
        config = self._get(self.config, "trainer")
        has_length = config.max_steps != -1 or config.max_epochs is not None or config.fast_dev_run
        return self._get(self.config, "minutes") is not None and self.subcommand == "fit" and not has_length

    def _set_length(self, start: Start | None) -> None:
        """Set the number of steps: of the run that is resumed, or for a new run as many as fit into its minutes."""
        minutes = self._get(self.config, "minutes")
        steps = start.settings.get("trainer.max_steps", -1) if start is not None else -1
        if steps == -1:
            run = Plan(self.trainer, self.model, self.datamodule)
            self.measured = find_steps(minutes, self.began, run, self.build_practice)
            steps = int(self.measured.total)
        else:
            rank_zero_info(
                f"--minutes {minutes:g} is for new runs: this run ends at step {steps}, or at --trainer.max_steps"
            )
        set_length(self.trainer, steps)
        self._get(self.config, "trainer").max_steps = steps
        self.model.settings = self._dump_settings()

    def build_practice(self, **options: Any) -> Trainer:
        """Return the trainer of a rehearsal of this run, with other settings and without the files of a run."""
        save_config, self.save_config_callback = self.save_config_callback, None
        try:
            return self.instantiate_trainer(**PRACTICE, **options)
        finally:
            self.save_config_callback = save_config

    # 4. After the fit, which the trainer runs.

    def after_fit(self) -> None:
        """Print the command that trains on if the run has trained for its minutes.

        A run with a cool-down cannot go on after it.
        """
        if self.measured is None or not self.writes or self.model.optim.cooldown is not None:
            return
        length = ["--ckpt_path", AUTO, "--trainer.max_steps", str(2 * self.trainer.max_steps)]
        rank_zero_info(f"train on: {localise('python train.py')} {shlex.join([*self.words, *length])}")

    # What several of these need.

    def _dump_settings(self) -> dict[str, Any]:
        """Return the settings of this run in EXPERIMENT by flag, such as {"model.optim.lr": 1e-4}.

        The checksums of the files that they name are settings, too.
        """
        text = self._parser(self.subcommand).dump(self.config[self.subcommand])
        values = flat(yaml.load(text, YAML_LOADER))
        settings = {name: value for name, value in values if name.startswith(EXPERIMENT)}
        if self._digests is None:  # the files may be large: they are read once
            self._digests = digest_files(settings)
        return settings | self._digests


@contextmanager
def _explain_instantiation() -> Iterator[None]:
    """Turn a constructor's error into a UserError with its cause, which jsonargparse hides among other attempts."""
    try:
        yield
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None and not isinstance(cause, UserError):
            cause = cause.__cause__
        if isinstance(cause, UserError):
            raise cause from None
        if command := INSTALL.search(str(cause)):
            raise UserError(f"this configuration needs a package that is not installed: {command[1]}") from error
        frame = traceback.extract_tb(cause.__traceback__)[-1]  # in case the class is at fault, not the user
        where = f"{type(cause).__name__} at {Path(frame.filename).name}:{frame.lineno}"
        raise UserError(f"this configuration cannot be built: {one_line(cause)} ({where})") from error


def as_list(value: Any) -> list[Any]:
    """Return a setting that may be one value or a list as a list."""
    return value if isinstance(value, list) else [value]
