"""A diffusers pipeline of our denoisers: the pictures of sample.py by diffusers' call.

This module is the file of an exported folder as it is, and imports nothing of this package. Its only components are
the denoiser and, for latents, an autoencoder. There is no scheduler: diffusers' schedulers step
on grids of 1000 levels and have no form of most of our samplers, so the denoiser brings its own, by name.
"""

# No `from __future__ import annotations`: diffusers 0.35 reads the annotations of DecayPipeline.__init__ as they are,
# and knows neither strings nor `X | None` there.
import inspect
import json
import re
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput, ModelMixin
from PIL import Image
from torch import Tensor

HOME, INDEX, COMPONENT = "uvit_decay", "model_index.json", "denoiser"
LARGEST_SEED = 2**63 - 1  # that torch.randint draws
CODE = re.compile(rf"_{HOME}_[a-z]+_[0-9a-f]{{8}}")  # names of files of Python, see `named`
OUTPUTS = ("pil", "np", "pt", "latent")
OutputType = Literal["pil", "np", "pt", "latent"]


class CodeFile(NamedTuple):
    """A file of Python with a class: the class's name, the file's name without .py, and its text."""

    kind: str
    name: str
    text: str


class DecayPipeline(DiffusionPipeline):
    """Images of a U-ViT or SiT with decayed identity shortcuts.

    Args:
        denoiser: the network with its noise path, see `uvit_decay.hub.denoiser`.
        vae: autoencoder of diffusers that decodes latents; None for a network of pixels.
        id2label: names of the classes by their numbers, as text; several names are separated by ", ".
        sampling: the recommended sampling.
    """

    model_cpu_offload_seq = "denoiser->vae"
    _optional_components = ["vae"]

    def __init__(
        self, denoiser: ModelMixin, vae: ModelMixin = None, id2label: dict = None, sampling: dict = None
    ) -> None:
        super().__init__()
        self.register_modules(denoiser=denoiser, vae=vae)
        self.register_to_config(id2label=id2label or {}, sampling=sampling or {})
        if denoiser.space is not None and vae is None:
            raise ValueError("this denoiser makes latents: the pipeline needs a vae that decodes them")

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | Sequence[int | str] | Tensor | None = None,
        num_images: int | None = None,
        guidance_scale: float | None = None,
        num_inference_steps: int | None = None,
        sampler: str | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        output_type: OutputType = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[list[Image.Image] | Tensor | np.ndarray]:
        """Sample images; what is not given is the sampling that the checkpoint recommends.

        Image i is a function of (seed, i, class i): that of `sample.py --seed` for the same number and class.

        Args:
            class_labels: class of each image, by number or by one of its names.
            num_images: number of images of an unconditional network; default: 1.
            guidance_scale: w of uncond + w (cond - uncond); 1 is none.
            num_inference_steps: steps of the sampler.
            sampler: dpm++, ddim, ddpm, euler, heun, ..., as sample.py names them.
            generator: a fresh one means its seed, whatever its device. Every call advances it, and one that is not
                fresh means a seed drawn from it. Of several, one an image, each gives image 0 of its seed. None draws a
                seed from torch's global generator.
            output_type: PIL images; np (b, h, w, c) or pt (b, c, h, w) in [0, 1]; latent, the final states (b, c, h, w)
                of the network.
            return_dict: return an ImagePipelineOutput rather than a tuple.

        Raises:
            ValueError: an argument that the checkpoint does not support.
            UserError: a sampling that it does not support, or images that are not finite.
        """
        if output_type not in OUTPUTS:
            raise ValueError(f"output_type must be one of {', '.join(OUTPUTS)}, got {output_type!r}")
        labels = self._labels(class_labels)
        keys = image_keys(self._count(labels, num_images), generator)
        given = {"sampler": sampler, "steps": num_inference_steps, "guidance": guidance_scale}
        changes = {name: value for name, value in given.items() if value is not None}
        sampling = self.denoiser.sampling(self.config.sampling, self._execution_device, changes)
        states = self._states(sampling, keys, labels)
        images = states if output_type == "latent" else self.denoiser.images(states, sampling, self.vae, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _states(self, sampling: Any, keys: Sequence[tuple[int, int]], labels: Sequence[int] | None) -> Tensor:
        """Return the final states; a sampler that chooses its own steps has one image at a time."""
        size = sampling.at_once(len(keys))
        parts = [slice(start, start + size) for start in range(0, len(keys), size)]
        done = []
        with self.progress_bar(total=len(parts) * sampling.num_steps) as bar:
            for part in parts:
                of_part = labels and labels[part]
                for state in self.denoiser.trajectory(sampling, keys[part], of_part, self._execution_device):
                    last = state
                    bar.update()
                done.append(last)
        return torch.cat(done)

    def _labels(self, class_labels: int | str | Sequence[int | str] | Tensor | None) -> list[int] | None:
        """Return the number of the class of each image; None for an unconditional network."""
        classes = self.denoiser.net.num_classes
        if not classes:
            if class_labels is not None:
                raise ValueError("this network is unconditional: leave out class_labels, and give num_images")
            return None
        if class_labels is None:
            raise ValueError(f"class_labels is missing: a class for each image, of 0 to {classes - 1}")
        if isinstance(class_labels, Tensor):
            class_labels = class_labels.tolist()
        several = [class_labels] if isinstance(class_labels, int | str) else list(class_labels)
        return [self._label(label, classes) for label in several]

    def _label(self, label: int | str, classes: int) -> int:
        """Return the number of a class, given by number or by name."""
        if isinstance(label, str):
            return self._named(label)
        if isinstance(label, bool) or int(label) != label or not 0 <= label < classes:
            raise ValueError(f"class_labels: there is no class {label}, there are 0 to {classes - 1}")
        return int(label)

    def _named(self, name: str) -> int:
        """Return the number of the class with this name, or with this one among its names, in any case."""
        labels = {int(number): label.casefold() for number, label in self.config.id2label.items()}
        name = name.casefold()
        found = [number for number, label in labels.items() if name in (label, *label.split(", "))]
        if len(found) > 1:
            raise ValueError(f"class_labels: {name!r} is the name of the classes {found}, give a number")
        if not found:
            raise ValueError(f"class_labels: no class is named {name!r}; pipe.config.id2label has the names")
        return found[0]

    def _count(self, labels: list[int] | None, num_images: int | None) -> int:
        """Return the number of images."""
        if labels is not None and num_images not in (None, len(labels)):
            raise ValueError(f"num_images {num_images}: class_labels has a class for each of {len(labels)} images")
        count = len(labels) if labels is not None else 1 if num_images is None else num_images
        if count < 1:
            raise ValueError(f"there must be at least 1 image, got {count}")
        return count

    def save_config(self, save_directory: str, push_to_hub: bool = False, **options: Any) -> None:
        """Write model_index.json and the files of Python that it names; the last step of `save_pretrained`."""
        super().save_config(save_directory, push_to_hub=push_to_hub, **options)
        write_files(Path(save_directory), code_of(type(self)), code_of(type(getattr(self, COMPONENT))))


def image_keys(count: int, generator: torch.Generator | Sequence[torch.Generator] | None) -> list[tuple[int, int]]:
    """Return seed and index of each image, of which its noise is a function."""
    if generator is None or isinstance(generator, torch.Generator):
        seed = drawn_seed(generator)
        return [(seed, index) for index in range(count)]
    if len(generator) != count:
        raise ValueError(f"generator: {len(generator)} for {count} images; give one, or one for each image")
    return [(drawn_seed(each), 0) for each in generator]


def drawn_seed(generator: torch.Generator | None) -> int:
    """Return the seed of a fresh generator, otherwise a number that it draws; advance it in both cases."""
    device = "cpu" if generator is None else generator.device
    fresh = generator is not None and is_fresh(generator)
    drawn = torch.randint(LARGEST_SEED, (), generator=generator, device=device)
    return generator.initial_seed() if fresh else int(drawn)


def is_fresh(generator: torch.Generator) -> bool:
    """Return whether nothing was drawn from a generator since it was seeded."""
    seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    return torch.equal(seeded.get_state(), generator.get_state())


def code_of(kind: type) -> CodeFile:
    """Return the file of Python that has this class."""
    return named(kind.__name__, inspect.getsource(sys.modules[kind.__module__]))


def named(kind: str, text: str) -> CodeFile:
    """Return a file under a name that tells its contents: diffusers copies the files of all folders into one.

    The name is private: jsonargparse would find two classes for the short name UViT in a process that loads a folder.
    """
    return CodeFile(kind, f"_{HOME}_{kind.lower()}_{sha256(text.encode()).hexdigest()[:8]}", text)


def is_own_code(path: Path) -> bool:
    """Return whether `named` gave this file its name, whose last part is the hash of the file's contents."""
    if not CODE.fullmatch(path.stem) or path.suffix != ".py" or not path.is_file():
        return False
    return path.stem.endswith(sha256(path.read_bytes()).hexdigest()[:8])


def write_files(folder: Path, pipeline: CodeFile, denoiser: CodeFile) -> None:
    """Write both files into a folder of diffusers, remove those of earlier exports, and name the new ones in its index.

    Files that are not from an export stay, whatever their names.
    """
    for old in (*folder.glob("*.py"), *folder.glob(f"{COMPONENT}/*.py")):
        if is_own_code(old):
            old.unlink()
    (folder / f"{pipeline.name}.py").write_text(pipeline.text)
    (folder / COMPONENT / f"{denoiser.name}.py").write_text(denoiser.text)
    index = json.loads((folder / INDEX).read_text())
    index |= {"_class_name": [pipeline.name, pipeline.kind], COMPONENT: [denoiser.name, denoiser.kind]}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
