"""A diffusers pipeline of our denoisers, which makes the same pictures as sample.py.

An exported folder contains a copy of this module, so it imports nothing of this package. The components of the pipeline
are the denoiser and, for latents, an autoencoder. There is no scheduler: diffusers' schedulers step on grids of 1000
levels and cannot express most of our samplers, so the denoiser has its own samplers, by name.
"""

# No `from __future__ import annotations`: diffusers 0.35 evaluates the annotations of DecayPipeline.__init__, and
# supports neither strings nor `X | None` there.
import inspect
import json
import sys
from collections.abc import Sequence
from hashlib import sha256
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput, ModelMixin
from PIL import Image
from torch import Tensor

HOME = "uvit_decay"
INDEX = "model_index.json"
COMPONENT = "denoiser"
LARGEST_SEED = 2**63 - 1  # largest bound of torch.randint
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
        id2label: names of each class by its number, as text; several names are separated by ", ".
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
            raise ValueError("this denoiser makes latents: pass a vae that decodes them")

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
        """Sample images; settings that are not given default to the recommended sampling of the checkpoint.

        Image i depends on (seed, i, class i) only, and equals image i of `sample.py --seed` with the same class.

        Args:
            class_labels: class of each image, by number or by one of its names.
            num_images: number of images of an unconditional network; default: 1.
            guidance_scale: w of uncond + w (cond - uncond); 1 is no guidance.
            num_inference_steps: steps of the sampler.
            sampler: dpm++, ddim, ddpm, euler, heun, ..., as sample.py names them.
            generator: a fresh generator stands for its seed, on any device. Every call advances it, and a generator
                that is not fresh stands for a seed drawn from it. With a sequence, one per image, each image is image 0
                of its generator's seed. None draws a seed from torch's global generator.
            output_type: "pil": PIL images; "np": (b, h, w, c) in [0, 1]; "pt": (b, c, h, w) in [0, 1]; "latent": the
                final states (b, c, h, w) of the network.
            return_dict: return an ImagePipelineOutput rather than a tuple.
        """
        if output_type not in OUTPUTS:
            raise ValueError(f"output_type must be one of {', '.join(OUTPUTS)}, got {output_type!r}")
        labels = self._labels(class_labels)
        keys = image_keys(self._count(labels, num_images), generator)
        changes: dict[str, Any] = {}
        if sampler is not None:
            changes["sampler"] = sampler
        if num_inference_steps is not None:
            changes["steps"] = num_inference_steps
        if guidance_scale is not None:
            changes["guidance"] = guidance_scale
        sampling = self.denoiser.sampling(self.config.sampling, self._execution_device, changes)
        images = self._states(sampling, keys, labels)
        if output_type != "latent":
            images = self.denoiser.images(images, sampling, self.vae, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _states(self, sampling: Any, keys: Sequence[tuple[int, int]], labels: Sequence[int] | None) -> Tensor:
        """Return the final states (b, c, h, w); a sampler that chooses its own steps gets one image at a time."""
        size = 1 if sampling.nfe is None else len(keys)
        starts = range(0, len(keys), size)
        done = []
        with self.progress_bar(total=len(starts) * sampling.num_steps) as bar:
            for start in starts:
                part = slice(start, start + size)
                part_labels = labels and labels[part]
                for state in self.denoiser.trajectory(sampling, keys[part], part_labels, self._execution_device):
                    last = state
                    bar.update()
                done.append(last)
        return torch.cat(done)

    def _labels(self, class_labels: int | str | Sequence[int | str] | Tensor | None) -> list[int] | None:
        """Return the class number of each image; None for an unconditional network."""
        classes = self.denoiser.net.num_classes
        if not classes:
            if class_labels is not None:
                raise ValueError("this network is unconditional: leave out class_labels, and give num_images")
            return None
        if class_labels is None:
            raise ValueError(f"class_labels is missing: give a class for each image, 0 to {classes - 1}")
        if isinstance(class_labels, Tensor):
            class_labels = class_labels.tolist()
        if isinstance(class_labels, Integral | str):
            class_labels = [class_labels]
        return [self._parse_label(label, classes) for label in class_labels]

    def _parse_label(self, label: int | str, classes: int) -> int:
        """Return the number of a class, given by number or by name."""
        if isinstance(label, str):
            return self._find_class(label)
        if isinstance(label, bool) or int(label) != label or not 0 <= label < classes:
            raise ValueError(f"class_labels: there is no class {label}, there are 0 to {classes - 1}")
        return int(label)

    def _find_class(self, name: str) -> int:
        """Return the number of the class with this name, in upper or lower case."""
        name = name.casefold()
        found = []
        for number, label in self.config.id2label.items():
            label = label.casefold()
            if name == label or name in label.split(", "):
                found.append(int(number))
        if len(found) > 1:
            raise ValueError(f"class_labels: {name!r} is the name of the classes {found}, give a number")
        if not found:
            raise ValueError(f"class_labels: no class is named {name!r}; pipe.config.id2label has the names")
        return found[0]

    def _count(self, labels: list[int] | None, num_images: int | None) -> int:
        """Return the number of images."""
        if labels is not None and num_images not in (None, len(labels)):
            raise ValueError(f"num_images {num_images}: class_labels has a class for each of {len(labels)} images")
        if labels is not None:
            return len(labels)
        return 1 if num_images is None else num_images

    def save_config(self, save_directory: str, push_to_hub: bool = False, **options: Any) -> None:
        """Write model_index.json and the files of Python that it names; the last step of `save_pretrained`."""
        super().save_config(save_directory, push_to_hub=push_to_hub, **options)
        write_files(Path(save_directory), code_of(type(self)), code_of(type(getattr(self, COMPONENT))))


def image_keys(count: int, generator: torch.Generator | Sequence[torch.Generator] | None) -> list[tuple[int, int]]:
    """Return seed and index of each image, which determine its noise."""
    if generator is None or isinstance(generator, torch.Generator):
        seed = draw_seed(generator)
        return [(seed, index) for index in range(count)]
    if len(generator) != count:
        raise ValueError(f"generator: {len(generator)} for {count} images; give one, or one for each image")
    return [(draw_seed(each), 0) for each in generator]


def draw_seed(generator: torch.Generator | None) -> int:
    """Return the seed of a fresh generator, otherwise a number drawn from it; advance the generator in both cases."""
    if generator is None:
        return int(torch.randint(LARGEST_SEED, ()))
    seeded = torch.Generator(generator.device).manual_seed(generator.initial_seed())
    is_fresh = torch.equal(seeded.get_state(), generator.get_state())
    number = torch.randint(LARGEST_SEED, (), generator=generator, device=generator.device)
    return generator.initial_seed() if is_fresh else int(number)


def code_of(kind: type) -> CodeFile:
    """Return the file of Python that defines this class."""
    return name_code(kind.__name__, inspect.getsource(sys.modules[kind.__module__]))


def name_code(kind: str, text: str) -> CodeFile:
    """Return a file of Python whose name contains the hash of its text.

    diffusers copies the files of all folders into one, so different files need different names. The name is private:
    otherwise jsonargparse would find two classes for the short name UViT in a process that loads a folder.
    """
    digest = sha256(text.encode()).hexdigest()[:8]
    return CodeFile(kind, f"_{HOME}_{kind.lower()}_{digest}", text)


def write_files(folder: Path, pipeline: CodeFile, denoiser: CodeFile) -> None:
    """Write both files into a folder of diffusers, and update its index."""
    (folder / f"{pipeline.name}.py").write_text(pipeline.text)
    (folder / COMPONENT / f"{denoiser.name}.py").write_text(denoiser.text)
    index = json.loads((folder / INDEX).read_text())
    index |= {"_class_name": [pipeline.name, pipeline.kind], COMPONENT: [denoiser.name, denoiser.kind]}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
