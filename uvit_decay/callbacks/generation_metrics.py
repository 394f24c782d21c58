"""Metrics of generated samples during training: fewer samples than for evaluate.py, measured by the same code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from uvit_decay.callbacks.ema import evaluation_weights
from uvit_decay.callbacks.periodic import PeriodicSampling, record
from uvit_decay.callbacks.stopping import at_signals
from uvit_decay.data import ImageData
from uvit_decay.diffusion.sampling import Sampling
from uvit_decay.encoders.extractors import Extractor
from uvit_decay.encoders.table import FeatureOptions
from uvit_decay.evaluation.comparison import MOST_REFERENCE, Comparison, open_reference
from uvit_decay.evaluation.extractor_cache import prepare_extractor
from uvit_decay.evaluation.image_sources import DatasetImages, GeneratedImages, ImageSource, choose_reference
from uvit_decay.evaluation.metric_table import MetricOptions, summary
from uvit_decay.evaluation.report import remarks
from uvit_decay.evaluation.report_html import Ceiling
from uvit_decay.evaluation.statistics_file import StatisticsFile
from uvit_decay.generation.options import MOST_IMAGES
from uvit_decay.generation.samples import Samples
from uvit_decay.latents.autoencoder import Autoencoder, decoder
from uvit_decay.pictures import to_uint8
from uvit_decay.runs.history import GENERATION
from uvit_decay.runtime.distributed import Processes
from uvit_decay.tasks.diffusion import DiffusionTask
from uvit_decay.terminal.errors import UserError, name_flags
from uvit_decay.terminal.typed import Bounds, Seed, check_types

PER_CLASS = 20  # training images of a class below which no classifier is trained for the metrics


@check_types
class GenerationMetrics(PeriodicSampling):
    """Metrics of `num` samples, generated on all ranks, against a reference; adds a line to generation.jsonl.

    A class-conditional network samples its classes in turn, with any sampler. All numbers are proxies of the published
    protocols; their keys name the protocol. Latents are decoded by their autoencoder and compared with the `reference`,
    which must be set. If there are no more training images than features, or if they have no classes and the extractor
    needs some, nothing is measured, and a line says so.

    Features of the reference, and a classifier that is trained on it, are made after the first training steps and
    cached on this machine, for all runs with the same images. If the data have test images, and the reference are the
    training images, the values of the test images stand beside the samples' (real images).

    Args:
        extractor: `Inception` for RGB photographs, `SmallClassifier` for small images such as digits, or a name as in
            --features of evaluate.py: the .ckpt or .safetensors of an encoder or classifier, timm:NAME=FILE, small-cnn.
            A classifier is trained on the reference, or on the training images if the reference has no labels.
        num: number of samples; FID and FD need more samples than the extractor has features.
        reference: as --reference of evaluate.py, its images cropped to the size of the samples; null: the training
            images.
        max_reference: largest number of training images in the reference, a fixed random choice; images that
            `reference` names are all taken.
        seed: seed of the samples.
        batch_size: images per batch on each device.
        allow_few: allow fewer images than features, for a trial.
        metrics: metrics by their names in --metrics of evaluate.py, such as [mind], the cheap one; null: all default
            metrics that compare no single images, such as fid (fd for other features than Inception's) and is.
        sampling: how to sample; null means the task's.
        every_n_steps: optimizer steps between evaluations; 0 means only at the end.
        at_end: evaluate when training ends, too.
        every_n_epochs: epochs between further evaluations; null means none.
    """

    history_file = GENERATION
    command = "python evaluate.py generation --ckpt {checkpoint} --reference {config}:train"

    def __init__(
        self,
        extractor: Extractor | str,
        num: Annotated[int, Bounds(1, MOST_IMAGES)] = 5000,
        reference: str | Path | None = None,
        max_reference: Annotated[int, Bounds(1, MOST_IMAGES)] = MOST_REFERENCE,
        seed: Seed = 1,
        batch_size: Annotated[int, Bounds(1, MOST_IMAGES)] = 256,
        allow_few: bool = False,
        metrics: list[str] | None = None,
        sampling: Sampling | None = None,
        every_n_steps: int = 0,
        at_end: bool = True,
        every_n_epochs: int | None = None,
    ) -> None:
        super().__init__(sampling, every_n_steps, at_end, every_n_epochs)
        if isinstance(extractor, str):
            with name_flags(lambda argument, _: "`extractor`" if argument == "features" else None):
                extractor = FeatureOptions(extractor).extractor(spatial=False)
        self.extractor = extractor
        self.num = num
        self.reference = None if reference is None else str(reference)
        self.max_reference = max_reference
        self.seed = seed
        self.batch_size = batch_size
        self.options = MetricOptions(None if metrics is None else tuple(metrics), allow_few=allow_few)
        self.options.check_names(extractor)
        self._reference_file: StatisticsFile | None = None
        self._reference_images: ImageSource | None = None
        self._autoencoder: Autoencoder | None = None  # on the CPU; `evaluate` makes a copy on the device
        self._size = 0  # side of the samples in pixels, set by `prepare_evaluation`; 0 before
        self._channels = 0  # channels of the images of which features are extracted
        self._is_ready = False  # whether features of the reference are extracted, and a classifier is trained
        self._ceiling: Ceiling | None = None  # values of the test images

    def samples(self, trainer: Trainer, task: DiffusionTask) -> int:
        return self.num

    def prepare_evaluation(self, trainer: Trainer, task: DiffusionTask) -> None:
        """Load extractor and autoencoder and check the reference before training, so that errors come early."""
        self._size, self._is_ready, self._ceiling = 0, False, None
        if trainer.fast_dev_run:
            return
        data: ImageData = trainer.datamodule
        self._size = data.image_size
        if data.latents:
            if self.reference is None:
                raise UserError("GenerationMetrics of latents needs a reference: set its init_args.reference")
            self._autoencoder = decoder(data.latents, None, "cpu")
            self._size *= self._autoencoder.space.factor
        # A classifier of the training images has their channels.
        self._channels = self.extractor.channels or (3 if data.latents else data.channels)
        if not self.extractor.needs_labels:
            self._prepare_extractor(data, task)
        if self.reference is not None:
            opened = open_reference(self.reference, self._channels, self._size)
            self._reference_file, self._reference_images = opened
        else:
            self._reference_images = choose_reference(self._open_data(data, "train"), self.max_reference)
        if self._reference_file is None or not self.extractor.needs_labels:
            self._comparison(task, self.sampling_for(task), "no", to_uint8).check()

    def find_obstacle(self, data: ImageData) -> str | None:
        """Return why nothing is measured, if the reference are the training images: too few, or without classes."""
        if self.reference is not None or data.latents:
            return None
        count, least = len(data.train), self.extractor.widths["features"]
        if self.extractor.needs_labels:
            if len(data.class_names) < 2:
                return f"{self.extractor.name} features need training images of two classes or more"
            # A classifier recognises nothing that it has seen only a few times.
            least = max(least, PER_CLASS * len(data.class_names))
        if count <= least and not self.options.allow_few:
            return f"{count} training images, they need more than {least}"
        return None

    def _open_data(self, data: ImageData, split: str) -> DatasetImages:
        """Return the training or test images of the run ("train" or "test")."""
        images = data.train if split == "train" else data.test
        return DatasetImages(f"{data.name}-{split}", images, self._channels, data.class_names)

    def _prepare_extractor(self, data: ImageData, task: DiffusionTask) -> None:
        """Load the extractor, or train it on the labelled reference, as evaluate.py does."""
        training = None
        if self.extractor.needs_labels:
            training = self._reference_images
            if training is None or training.labels is None or len(training.class_names) < 2:
                training = choose_reference(self._open_data(data, "train"), self.max_reference)
            training = choose_reference(training, MOST_REFERENCE)
        shape = (self._channels, self._size, self._size)
        prepare_extractor(self.extractor, shape, task.device, Processes.current(), training)

    def on_train_batch_end(self, trainer: Trainer, task: DiffusionTask, *args: Any) -> None:
        """Make features of the reference and the classifier after the first steps, at a step that is logged.

        Errors still come early, the first losses are seen before, and the time does not count as training.
        """
        every = trainer.log_every_n_steps or 1
        step = trainer.global_step
        if not self._is_ready and step > max(self.evaluated, 0) and step % every == 0:
            with at_signals(trainer, leave=True), self._shown(trainer):
                self.prepare_once(trainer, task)
        super().on_train_batch_end(trainer, task, *args)

    def prepare_once(self, trainer: Trainer, task: DiffusionTask) -> None:
        """Train the extractor if it is to be trained, and extract the features of reference and test images."""
        if not self._size:
            return
        data: ImageData = trainer.datamodule
        if self.extractor.needs_labels:
            self._prepare_extractor(data, task)
        comparison = self._comparison(task, self.sampling_for(task), "no", to_uint8)
        comparison.check()
        processes = Processes.current()
        reference = comparison.extract_reference(processes)
        if self.reference is None and not data.latents and data.test is not None and len(data.test):
            images = self._open_data(data, "test")
            if comparison.can_compare(images):
                real = comparison.compare_real(images)
                self._ceiling = Ceiling(real.name, real.measure_real(reference, processes))
        self._is_ready = True

    def _comparison(
        self, task: DiffusionTask, sampling: Sampling, weights: str, decode: Callable[[Tensor], Tensor]
    ) -> Comparison:
        shape = (3 if self._autoencoder else task.net.channels, self._size, self._size)
        classes = range(task.net.num_classes)
        samples = Samples(task.source(), sampling, weights, classes, seed=self.seed, decode=decode, shape=shape)
        names = task.trainer.datamodule.class_names
        images = GeneratedImages(samples, self.samples(task.trainer, task), self._channels, names)
        options = replace(self.options, metrics=self.options.choose(self.extractor, 0))
        return Comparison(
            images,
            self._reference_file,
            self._reference_images,
            self.extractor,
            task.device,
            self.batch_size,
            options,
        )

    def evaluate(self, trainer: Trainer, task: DiffusionTask) -> dict[str, float] | None:
        if not self._is_ready:
            self.prepare_once(trainer, task)
        sampling = self.sampling_for(task)
        processes = Processes.current()
        decode = to_uint8
        if self._autoencoder is not None:
            decode = self._autoencoder.on(task.device).decode
        with evaluation_weights(trainer, task) as weights, TemporaryDirectory() as folder:
            comparison = self._comparison(task, sampling, weights, decode)
            store, reference = comparison.extract(Path(folder) / "samples", processes)
            if not processes.is_main:
                return None
            values = comparison.measure(store, reference)
            self._report(trainer, values, comparison, store.nfe)
            return values

    def _report(self, trainer: Trainer, values: dict[str, float], comparison: Comparison, nfe: float) -> None:
        """Save, log and print the values; only rank 0 may call this."""
        key = comparison.name
        metadata = {**comparison.metadata(), "measured_nfe": nfe, "remarks": remarks(comparison)}
        logged = {f"{name}/{key}": value for name, value in values.items()}
        real: dict[str, float] = {}
        if self._ceiling is not None:
            real = self._ceiling.values
            metadata["ceiling"] = {"images": self._ceiling.name, "values": real}
            logged |= {f"{name}/{self._ceiling.name}": value for name, value in real.items()}
        record(trainer, self.folder / GENERATION, values, metadata, logged)
        shown = summary(values, metadata["extractor"], real)
        rank_zero_info(f"GenerationMetrics at step {trainer.global_step}: {shown} ({key})")
