"""Metrics of generated samples during training: fewer samples than for evaluate.py, measured by the same code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from uvit_decay.callbacks.ema import evaluation_weights
from uvit_decay.callbacks.periodic import PeriodicSampling, record
from uvit_decay.data import ImageData
from uvit_decay.diffusion.sampling import Sampling, total_nfe
from uvit_decay.evaluation.feature_table import FeatureOptions
from uvit_decay.evaluation.generation import MOST_REFERENCE, Comparison, open_reference
from uvit_decay.evaluation.image_sources import DatasetImages, GeneratedImages, ImageSource
from uvit_decay.evaluation.metric_table import MetricOptions, summary
from uvit_decay.evaluation.report import remarks
from uvit_decay.evaluation.statistics_file import StatisticsFile
from uvit_decay.generation.options import MOST_IMAGES
from uvit_decay.generation.samples import Samples
from uvit_decay.images.autoencoder import Autoencoder, decoder
from uvit_decay.images.io import to_uint8
from uvit_decay.metrics.extractors import Extractor, prepare
from uvit_decay.runs.counters import run_length
from uvit_decay.runs.history import GENERATION
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.errors import MOST_SEED, UserError, check_whole
from uvit_decay.runtime.random import subset
from uvit_decay.runtime.typed import check_types
from uvit_decay.tasks.diffusion import DiffusionTask

MOST = 5000  # images of each measurement


@check_types
class GenerationMetrics(PeriodicSampling):
    """Metrics of `num` samples, generated on all ranks, against a reference; adds a line to generation.jsonl.

    A class-conditional network samples its classes in turn, with any sampler. All numbers are proxies of the published
    protocols; their keys name the protocol. Features of the reference are cached on this machine. Latents are decoded
    by their autoencoder and compared with the `reference`, which must be set.

    Args:
        extractor: `Inception` for RGB photographs, `SmallClassifier` for small images such as digits, or a name as in
            --features of evaluate.py: the .ckpt or .safetensors of an encoder or classifier, timm:NAME=FILE, small-cnn.
        num: number of samples; FID and FD need more samples than the extractor has features. null sizes the number to
            the data and the run: one for each training image, at most 5,000, and only as many as cost half of the
            training's network evaluations, but at least twice as many as features. If there are no more training images
            than features, nothing is measured.
        reference: as --reference of evaluate.py, its images cropped to the size of the samples; null: the training
            images.
        max_reference: largest number of training images in the reference, a fixed random choice.
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

    def __init__(
        self,
        extractor: Extractor | str,
        num: int | None = MOST,
        reference: str | Path | None = None,
        max_reference: int = MOST_REFERENCE,
        seed: int = 1,
        batch_size: int = 256,
        allow_few: bool = False,
        metrics: list[str] | None = None,
        sampling: Sampling | None = None,
        every_n_steps: int = 0,
        at_end: bool = True,
        every_n_epochs: int | None = None,
    ) -> None:
        super().__init__(sampling, every_n_steps, at_end, every_n_epochs)
        check_whole(1, MOST_IMAGES, max_reference=max_reference, batch_size=batch_size)
        if num is not None:
            check_whole(1, MOST_IMAGES, num=num)
        check_whole(0, MOST_SEED, seed=seed)
        if isinstance(extractor, str):
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
        self._size = 0  # side of the samples in pixels, set by `prepare_evaluation`; 0 if nothing is measured

    def samples(self, trainer: Trainer, task: DiffusionTask) -> int:
        if self.num is not None:
            return self.num
        least = 2 * self.extractor.widths["features"]
        affordable = self.affordable(trainer) / total_nfe(1, self.sampling_for(task))
        return int(max(least, min(MOST, len(trainer.datamodule.train), affordable)))

    def prepare_evaluation(self, trainer: Trainer, task: DiffusionTask) -> None:
        """Load extractor, autoencoder and reference before training, so that missing files are reported early."""
        if trainer.fast_dev_run or not self._measures(trainer):
            return
        data: ImageData = trainer.datamodule
        features = self.extractor.widths["features"]
        if self.num is None and self.reference is None and len(data.train) <= features:
            reason = f"{len(data.train)} training images, they need more than {features}"
            rank_zero_info(f"warning: GenerationMetrics are left out: {reason}")
            return
        self._size = data.image_size
        if data.latents:
            if self.reference is None:
                raise UserError("GenerationMetrics of latents needs a reference: set its init_args.reference")
            self._autoencoder = decoder(data.latents, None, "cpu")
            self._size *= self._autoencoder.space.factor
        if self.extractor.needs_labels and (data.latents or len(data.class_names) < 2):
            raise UserError(f"{self.extractor.name} features need training images of two classes or more")
        channels = self.extractor.channels or data.channels  # a classifier of the training images has theirs
        shape = (channels, self._size, self._size)
        prepare(self.extractor, shape, task.device, lambda: self._read_training_set(data))
        if self.reference is not None:
            opened = open_reference(self.reference, self.extractor.channels, self._size)
            self._reference_file, self._reference_images = opened
        else:
            self._reference_images = DatasetImages(
                f"{data.name}-train",
                data.train,
                self.extractor.channels,
                data.class_names,
                self._reference_indices(data),
            )

    def _read_training_set(self, data: ImageData) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        """Return images and labels of the reference, on which a classifier is trained, and its classes."""
        images, labels = data.train[self._reference_indices(data)]
        return images, labels, data.class_names

    def _measures(self, trainer: Trainer) -> bool:
        """Return whether any evaluation takes place in the run."""
        if self.at_end or self.every_n_epochs:
            return True
        _, total_steps = run_length(trainer)
        return 0 < self.every_n_steps <= total_steps

    def on_fit_start(self, trainer: Trainer, task: DiffusionTask) -> None:
        """Extract the features of the reference as well; `evaluate` finds them in the cache."""
        super().on_fit_start(trainer, task)
        if not self._size:
            return
        comparison = self._comparison(task, self.sampling_for(task), "no", to_uint8)
        comparison.check()
        with self._shown(trainer):
            comparison.extract_reference(Processes.current())

    def _reference_indices(self, data: ImageData) -> list[int]:
        """Return the indices of the training images in the reference; a classifier is trained on the same images."""
        return subset(data.train, self.max_reference, "reference")

    def _comparison(
        self, task: DiffusionTask, sampling: Sampling, weights: str, decode: Callable[[Tensor], Tensor]
    ) -> Comparison:
        channels = 3 if self._autoencoder else task.net.channels
        shape = (channels, self._size, self._size)
        classes = range(task.net.num_classes)
        samples = Samples(task.source(), sampling, weights, classes, seed=self.seed, decode=decode, shape=shape)
        names = task.trainer.datamodule.class_names
        images = GeneratedImages(samples, self.samples(task.trainer, task), self.extractor.channels, names)
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

    def evaluate(self, trainer: Trainer, task: DiffusionTask) -> None:
        if not self._size:
            return
        sampling = self.sampling_for(task)
        processes = Processes.current()
        decode = to_uint8
        if self._autoencoder is not None:
            decode = self._autoencoder.on(task.device).decode
        with evaluation_weights(trainer, task) as weights, TemporaryDirectory() as folder:
            comparison = self._comparison(task, sampling, weights, decode)
            store, reference = comparison.extract(Path(folder) / "samples", processes)
            if processes.is_main:
                values = comparison.measure(store, reference)
                self._report(trainer, values, comparison, store.nfe)

    def _report(self, trainer: Trainer, values: dict[str, float], comparison: Comparison, nfe: float) -> None:
        """Save, log and print the values; only rank 0 may call this."""
        key = comparison.name
        metadata = {**comparison.metadata(), "measured_nfe": nfe, "remarks": remarks(comparison)}
        logged = {f"{name}/{key}": value for name, value in values.items()}
        record(trainer, self.folder / GENERATION, values, metadata, logged)
        shown = summary(values, metadata["extractor"])
        rank_zero_info(f"GenerationMetrics at step {trainer.global_step}: {shown} ({key})")
