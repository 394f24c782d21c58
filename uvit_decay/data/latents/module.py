"""The data module of latents."""

from __future__ import annotations

from torch import Tensor

from uvit_decay.class_names import class_hash, class_list
from uvit_decay.data.batches import Batch
from uvit_decay.data.datamodule import ImageData
from uvit_decay.data.latents.manifest import read
from uvit_decay.data.latents.shards import LatentSet
from uvit_decay.runtime.errors import UserError
from uvit_decay.runtime.files import at_home
from uvit_decay.runtime.random import normal


class Latents(ImageData):
    """Latents made by `uvit-decay encode`; the posterior is sampled anew for every batch.

    Args:
        path: folder of the training latents.
        test_path: folder of the test latents, of the same autoencoder and classes; for validation loss and probes.
        classes: the class list that the latents must have been made with: `imagenet-100/cmc`, `imagenet-1k` or a text
            file. Null accepts any classes.
        batch_size: global batch size, over all devices.
        device_batch_size: most latents per forward pass on a device, see `ImageData`.
        flip: use the latents of the mirror image half of the time.
        num_workers: reader processes per device.
        seed: random seed of the order, the mirror images and the posterior samples.
        verify: compare all data that are read with their checksums.
    """

    def __init__(
        self,
        path: str,
        test_path: str | None = None,
        classes: str | None = None,
        batch_size: int = 1024,
        device_batch_size: int | None = None,
        flip: bool = True,
        num_workers: int = 4,
        seed: int = 0,
        verify: bool = True,
    ) -> None:
        super().__init__(0, 0, batch_size, flip, seed, num_workers, device_batch_size)  # sizes: see `load`
        self.path, self.test_path, self.classes = at_home(path), test_path, classes
        self.verify = verify

    @property
    def name(self) -> str:
        """Name of the training set in reports: that of its folder."""
        return self.path.name

    def load(self) -> None:
        """Read the manifests and open the sets."""
        manifest = read(self.path)
        if self.classes is not None:
            expected = class_hash(class_list(self.classes))
            if manifest.class_hash != expected:
                raise UserError(
                    f"{self.path} has the classes {manifest.class_list or 'of its folders'} (sha256 "
                    f"{manifest.class_hash[:12]}), the config wants {self.classes} ({expected[:12]})"
                )
        self.image_size, self.channels, self.latents = manifest.size, manifest.latents.channels, manifest.latents
        self.class_names = manifest.class_names
        self.train = LatentSet(self.path, manifest, self.verify)
        if self.test_path is not None:
            path = at_home(self.test_path)
            test = read(path)
            self.latents.check_same(test.latents, str(self.path), str(path))
            for key in ("image_size", "class_hash"):
                values = getattr(manifest, key), getattr(test, key)
                if values[0] != values[1]:
                    raise UserError(f"{self.path} has {key} {values[0]}, {path} {values[1]}")
            if manifest.content_hash == test.content_hash:
                self.warn_of_overlap(f"{path} and {self.path} hold latents of the same images")
            self.test = LatentSet(path, test, self.verify)

    def network_input(self, stored: Tensor) -> Tensor:
        """Return the normalised posterior mean, float32 (b, c, h, w), of stored moments (b, 2c, h, w)."""
        return self.latents.mean(stored)

    def preview(self, x: Tensor) -> Tensor:
        """Approximate latents by uint8 RGB images (b, 3, h, w) with the linear map, without the autoencoder."""
        return self.latents.preview(x)

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        """Sample the posterior; the noise depends only on the seed and the positions of the images in the run."""
        stage, shape = "train" if self.trainer.training else "test", (self.channels, self.image_size, self.image_size)
        noise = normal("posterior", stage, self.seed, rows=batch.sample_ids, shape=shape)
        return batch._replace(images=self.latents.sample(batch.images, noise))
