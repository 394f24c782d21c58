"""Metrics of generated samples during training: fewer samples than for evaluate.py, measured by the same code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from uvit_decay.callbacks.ema import evaluation_weights
from uvit_decay.callbacks.generation_size import REFERENCE_SHARE, find_price, limit_reference
from uvit_decay.callbacks.periodic import PeriodicSampling, record
from uvit_decay.callbacks.stopping import at_signals
from uvit_decay.data import ImageData
from uvit_decay.diffusion.sampling import Sampling, total_nfe
from uvit_decay.evaluation.cache import prepare_extractor
from uvit_decay.evaluation.feature_table import FeatureOptions
from uvit_decay.evaluation.generation import MOST_REFERENCE, Comparison, open_reference
from uvit_decay.evaluation.image_sources import DatasetImages, GeneratedImages, ImageSource, choose_reference
from uvit_decay.evaluation.metric_table import CONSISTENCY, MetricOptions, summary
from uvit_decay.evaluation.report import remarks
from uvit_decay.evaluation.report_html import Ceiling
from uvit_decay.evaluation.statistics_file import StatisticsFile
from uvit_decay.generation.options import MOST_IMAGES
from uvit_decay.generation.samples import Samples
from uvit_decay.images.autoencoder import Autoencoder, decoder
from uvit_decay.images.io import to_uint8
from uvit_decay.metrics.extractors import Extractor
from uvit_decay.runs.counters import run_length
from uvit_decay.runs.history import GENERATION
from uvit_decay.runs.stage import describe_early, finds_no_class, is_early
from uvit_decay.runtime.distributed import Processes
from uvit_decay.runtime.errors import MOST_SEED, UserError, check_whole
from uvit_decay.runtime.typed import check_types
from uvit_decay.tasks.diffusion import DiffusionTask

MOST = 5000  # images of each measurement
PER_CLASS = 20  # training images of a class below which no classifier is trained for the metrics


@check_types
class GenerationMetrics(PeriodicSampling):
    """Metrics of `num` samples, generated on all ranks, against a reference; adds a line to generation.jsonl.

    A class-conditional network samples its classes in turn, with any sampler. All numbers are proxies of the published
    protocols; their keys name the protocol. Latents are decoded by their autoencoder and compared with the `reference`,
    which must be set.

    Features of the reference, and a classifier that is trained on it, are made after the first training steps and
    cached on this machine, for all runs with the same images. If the data have test images, and the reference are the
    training images, the values of the test images stand beside the samples' (real images).

    Args:
        extractor: `Inception` for RGB photographs, `SmallClassifier` for small images such as digits, or a name as in
            --features of evaluate.py: the .ckpt or .safetensors of an encoder or classifier, timm:NAME=FILE, small-cnn.
            A classifier is trained on the reference, or on the training images if the reference has no labels.
        num: number of samples; FID and FD need more samples than the extractor has features. null sizes the number to
            the data and the run: one for each training image, at most 5,000, and only as many as cost half of the
            training's network evaluations, but at least twice as many as features. If there are no more training images
            than features, or if they have no classes and the extractor needs some, nothing is measured.
        reference: as --reference of evaluate.py, its images cropped to the size of the samples; null: the training
            images.
        max_reference: largest number of training images in the reference, a fixed random choice; images that
            `reference` names are all taken. null halves either, from at most 50,000 images, until their features and
            classifier cost at most a quarter of the training, by their FLOPs; the samples may then cost the rest of the
            half.
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
        max_reference: int | None = MOST_REFERENCE,
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
        check_whole(1, MOST_IMAGES, batch_size=batch_size)
        for name, count in (("num", num), ("max_reference", max_reference)):
            if count is not None:
                check_whole(1, MOST_IMAGES, **{name: count})
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
        self._channels = 0  # channels of the images of which features are extracted
        self._spent = 0.0  # network evaluations that the reference costs, if it is sized to the run
        self._is_ready = False  # whether features of the reference are extracted, and a classifier is trained
        self._ceiling: Ceiling | None = None  # values of the test images

    def samples(self, trainer: Trainer, task: DiffusionTask) -> int:
        if self.num is not None:
            return self.num
        affordable = (self.budget(trainer) - self._spent) / self.count_times(trainer)
        wanted = min(MOST, len(trainer.datamodule.train), affordable / total_nfe(1, self.sampling_for(task)))
        return int(max(self._least, wanted))

    @property
    def _least(self) -> int:
        """The least number of samples and of reference images that are sized to the run."""
        return 2 * self.extractor.widths["features"]

    def prepare_evaluation(self, trainer: Trainer, task: DiffusionTask) -> None:
        """Load extractor and autoencoder and check the reference before training, so that errors come early."""
        self._size, self._spent, self._is_ready, self._ceiling = 0, 0.0, False, None
        if trainer.fast_dev_run or not self._measures(trainer):
            return
        data: ImageData = trainer.datamodule
        obstacle = self._find_obstacle(data)
        if obstacle is not None:
            rank_zero_info(f"warning: GenerationMetrics are left out: {obstacle}")
            return
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
        self._open_reference(trainer, task)
        if self._reference_file is None or not self.extractor.needs_labels:
            self._comparison(task, self.sampling_for(task), "no", to_uint8).check()

    def _find_obstacle(self, data: ImageData) -> str | None:
        """Return why nothing is measured if the metrics are sized to the data; None if nothing stands in the way.

        Raises:
            UserError: the extractor needs labels, there are none, and the metrics are not sized to the data.
        """
        count, least = len(data.train), self.extractor.widths["features"]
        if self.extractor.needs_labels:  # a classifier recognises nothing that it has seen only a few times
            least = max(least, PER_CLASS * len(data.class_names))
        if self.num is None and self.reference is None and count <= least:
            return f"{count} training images, they need more than {least}"
        if self.extractor.needs_labels and self.reference is None and (data.latents or len(data.class_names) < 2):
            needs = f"{self.extractor.name} features need training images of two classes or more"
            if self.num is None:
                return needs
            raise UserError(needs)
        return None

    def is_left_out(self, data: ImageData) -> bool:
        return self._find_obstacle(data) is not None

    def preparations(self, trainer: Trainer, task: DiffusionTask) -> float:
        if not self._size:
            return 0.0
        self._open_reference(trainer, task)  # its size follows the length of the run
        return self._spent

    def evaluations(self, trainer: Trainer, task: DiffusionTask) -> int:
        if self._find_obstacle(trainer.datamodule) is not None:
            return 0
        return super().evaluations(trainer, task)

    def _open_reference(self, trainer: Trainer, task: DiffusionTask) -> None:
        """Open the reference, and choose as many of its images as the run can afford."""
        if self.reference is not None:
            opened = open_reference(self.reference, self._channels, self._size)
            self._reference_file, self._reference_images = opened
        else:
            self._reference_images = self._open_data(trainer.datamodule, "train")
        images = self._reference_images
        if images is None:
            return
        if self.max_reference is None:
            price = find_price(self.extractor, images.shape, task)
            most = min(MOST_REFERENCE, len(images))
            budget = self.budget(trainer)
            count = limit_reference(most, self._least, REFERENCE_SHARE * budget, price)
            self._spent = min(budget, count * price(count))
            self._reference_images = choose_reference(images, count)
        elif self.reference is None:
            self._reference_images = choose_reference(images, self.max_reference)

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
                training = choose_reference(self._open_data(data, "train"), self.max_reference or MOST_REFERENCE)
            training = choose_reference(training, MOST_REFERENCE)
        shape = (self._channels, self._size, self._size)
        prepare_extractor(self.extractor, shape, task.device, Processes.current(), training)

    def _measures(self, trainer: Trainer) -> bool:
        """Return whether any evaluation takes place in the run."""
        if self.at_end or self.every_n_epochs:
            return True
        _, total_steps = run_length(trainer)
        return 0 < self.every_n_steps <= total_steps

    def on_train_batch_end(self, trainer: Trainer, task: DiffusionTask, *args: Any) -> None:
        """Make features of the reference and the classifier after the first steps, at a step that is logged.

        Errors still come early, the first losses are seen before, and the time does not count as training.
        """
        every = trainer.log_every_n_steps or 1
        step = trainer.global_step
        if self._size and not self._is_ready and step > max(self.evaluated, 0) and step % every == 0:
            with at_signals(trainer, leave=True), self._shown(trainer):
                self._prepare_reference(trainer, task)
        super().on_train_batch_end(trainer, task, *args)

    def _prepare_reference(self, trainer: Trainer, task: DiffusionTask) -> None:
        """Train the extractor if it is to be trained, and extract the features of reference and test images."""
        data: ImageData = trainer.datamodule
        if self.extractor.needs_labels:
            self._prepare_extractor(data, task)
        comparison = self._comparison(task, self.sampling_for(task), "no", to_uint8)
        comparison.check()
        processes = Processes.current()
        reference = comparison.extract_reference(processes)
        real = self._compare_test_images(data, comparison)
        if real is not None:
            self._ceiling = Ceiling(real.name, real.measure_real(reference, processes))
        self._is_ready = True

    def _compare_test_images(self, data: ImageData, comparison: Comparison) -> Comparison | None:
        """Return the comparison of the test images with the training images; None without test images or budget."""
        if self.reference is not None or data.latents or data.test is None or not len(data.test):
            return None
        images = self._open_data(data, "test")
        if not comparison.can_compare(images):
            return None
        real = comparison.compare_real(images)
        # Test images only need features, and so cost less than reference images.
        too_dear = self.max_reference is None and len(real.samples) > len(comparison.reference)
        return None if too_dear else real

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

    def evaluate(self, trainer: Trainer, task: DiffusionTask) -> None:
        if not self._size:
            return
        if not self._is_ready:
            self._prepare_reference(trainer, task)
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
        real: dict[str, float] = {}
        if self._ceiling is not None:
            real = self._ceiling.values
            metadata["ceiling"] = {"images": self._ceiling.name, "values": real}
            logged |= {f"{name}/{self._ceiling.name}": value for name, value in real.items()}
        record(trainer, self.folder / GENERATION, values, metadata, logged)
        shown = summary(values, metadata["extractor"], real)
        rank_zero_info(f"GenerationMetrics at step {trainer.global_step}: {shown} ({key})")
        task = trainer.lightning_module
        consistency = values.get(CONSISTENCY)
        if consistency is None or is_early(trainer.global_step, task.settings):  # previews say it
            return
        if finds_no_class(consistency, task.net.num_classes, metadata["n"]):
            rank_zero_info(describe_early(trainer.global_step, task.settings))
