"""The data module of latents."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from uvit_decay.data.batches import Batch
from uvit_decay.data.classes import class_hash, ordered_class_list
from uvit_decay.data.datamodule import ImageData, Sizes
from uvit_decay.files.writing import at_home
from uvit_decay.latents.manifest import Manifest, read
from uvit_decay.latents.shards import LatentSet
from uvit_decay.runtime.random import normal
from uvit_decay.terminal.errors import UserError
from uvit_decay.terminal.typed import check_types


@check_types
class Latents(ImageData):
    """Latents from `uvit-decay encode`; every batch gets new samples of the posterior.

    Args:
        path: folder of the training latents.
        test_path: folder of the test latents, of the same autoencoder and classes; for validation loss and probes.
        classes: require the latents of this class list: `imagenet-100/cmc`, `imagenet-1k` or a text file. Null accepts
            any classes.
        batch_size: global batch size, over all devices.
        device_batch_size: most latents per forward pass on a device, see `ImageData`.
        flip: use the latents of the mirror image half of the time.
        num_workers: reader processes per device.
        seed: random seed of the order, the mirror images and the posterior samples.
        verify: compare all data that are read with their checksums.
    """

    def __init__(
        self,
        path: str | Path,
        test_path: str | Path | None = None,
        classes: str | Path | None = None,
        batch_size: int = 1024,
        device_batch_size: int | None = None,
        flip: bool = True,
        num_workers: int = 4,
        seed: int = 0,
        verify: bool = True,
    ) -> None:
        super().__init__(0, 0, batch_size, flip, seed, num_workers, device_batch_size)  # `load` sets the sizes
        self.path = at_home(path)
        self.test_path = test_path
        self.classes = None if classes is None else str(classes)
        self.verify = verify

    @property
    def name(self) -> str:
        """Name of the training set in reports: the name of its folder."""
        return self.path.name

    def find_sizes(self) -> Sizes:
        """Return the sizes of the latents, from their manifest."""
        manifest = read(self.path)
        return Sizes(manifest.size, manifest.latents.channels, len(manifest.class_names))

    def load(self) -> None:
        """Read the manifests and open the sets."""
        manifest = read(self.path)
        self._check_classes(manifest)
        self.latents = manifest.latents
        self.image_size = manifest.size
        self.channels = manifest.latents.channels
        self.class_names = manifest.class_names
        self.train = LatentSet(self.path, manifest, self.verify)
        if self.test_path is not None:
            self.test = self._load_test(at_home(self.test_path), manifest)

    def _check_classes(self, manifest: Manifest) -> None:
        """Raise a UserError unless the latents have the classes of the list that is required."""
        if self.classes is None:
            return
        names = ordered_class_list(self.classes)
        expected = class_hash(sorted(names))
        if manifest.class_hash not in (expected, class_hash(names)):  # of folders; of labels, which a list named
            actual = manifest.class_list or "of its folders"
            raise UserError(
                f"{self.path} has the classes {actual} (sha256 {manifest.class_hash[:12]}), not {self.classes} "
                f"({expected[:12]}); set `classes` to the list of the latents, or encode the images again"
            )

    def _load_test(self, path: Path, training: Manifest) -> LatentSet:
        """Open the test latents; raise a UserError unless they fit the training latents."""
        test = read(path)
        training.latents.check_same(test.latents, str(self.path), str(path))
        for key in ("image_size", "class_hash"):
            ours, theirs = getattr(training, key), getattr(test, key)
            if ours != theirs:
                raise UserError(f"{self.path} has {key} {ours}, {path} has {theirs}; encode both in the same way")
        if training.content_hash == test.content_hash:
            self.warn_of_overlap(f"{path} and {self.path} contain latents of the same images")
        return LatentSet(path, test, self.verify)

    def network_input(self, stored: Tensor) -> Tensor:
        """Return the normalised posterior mean, float32 (b, c, h, w), of stored moments (b, 2c, h, w)."""
        return self.latents.mean(stored)

    def preview(self, x: Tensor) -> Tensor:
        """Convert latents to rough uint8 RGB images (b, 3, h, w) by the linear map, without the autoencoder."""
        return self.latents.preview(x)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Sample the posterior; the noise depends only on the seed and the positions of the images in the run."""
        stage = "train" if self.trainer.training else "test"
        shape = (self.channels, self.image_size, self.image_size)
        noise = normal("posterior", stage, self.seed, rows=batch.sample_ids, shape=shape)
        return batch._replace(images=self.latents.sample(batch.images, noise))
