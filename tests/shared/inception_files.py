"""A file of random Inception weights in torch-fidelity's layout, written by torch-fidelity's own network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from uvit_decay.encoders.extractors import Extractor


def layout() -> dict[str, torch.Tensor]:
    """Return the state_dict of torch-fidelity's network, on the meta device."""
    from torch_fidelity import feature_extractor_inceptionv3 as fidelity

    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):
        patch.setattr(fidelity, "load_state_dict_from_url", lambda *args, **options: {})
        patch.setattr(fidelity.FeatureExtractorInceptionV3, "load_state_dict", lambda self, state: None)
        return fidelity.FeatureExtractorInceptionV3("inception-v3-compat", ["2048"]).state_dict()


def random_weights(path: Path, seed: int = 0) -> Path:
    """Write the file and return its path; features stay of order one through the depth."""
    g = torch.Generator().manual_seed(seed)
    torch.save({name: _random(name, value, g) for name, value in layout().items()}, path)
    return path


def prepare(extractor: Extractor) -> Extractor:
    """Return the extractor with its weights, on the CPU."""
    images, labels = torch.zeros(0, 3, 8, 8, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    extractor.prepare(images, labels, torch.device("cpu"))
    return extractor


def _random(name: str, like: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Return He-normal kernels, and batch norms unlike the identity, so that ignored or swapped parts are found."""
    value = torch.zeros(like.shape, dtype=like.dtype)
    if like.ndim > 1:
        gain = 1 if name == "fc.weight" else 2
        return value.normal_(std=(gain / like[0].numel()) ** 0.5, generator=g)
    if name.endswith(("bn.weight", "running_var")):
        return value.uniform_(0.8, 1.25, generator=g)
    return value.normal_(std=0.1, generator=g) if like.is_floating_point() else value
