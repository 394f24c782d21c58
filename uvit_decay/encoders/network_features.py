"""Networks of this project and of timm as feature extractors of generation metrics."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from uvit_decay.encoders.extractors import Extractor, Features
from uvit_decay.encoders.pooled import PooledNetwork, open_pooled
from uvit_decay.pictures import to_float
from uvit_decay.runtime.tensor_files import digest
from uvit_decay.runtime.typed import check_types

SHORT = 12  # digits of the SHA-256 in names
_AT_ONCE = 16  # images in a batch on a CPU


@check_types
class NetworkFeatures(Extractor):
    """Pooled features of an encoder or classifier: a checkpoint of this project, or a model of timm.

    Images of another size than the network's are resized as a whole. A classifier with named classes also tells how
    many samples have the class that they were generated for (label consistency).

    Args:
        file: path of a .ckpt or .safetensors, timm:NAME=FILE, or timm:NAME for timm's pretrained weights.
        trusted: classes outside uvit_decay, or modules, that the file may name.

    Raises:
        UserError: the file cannot be read, or has no features of clean images.
    """

    def __init__(self, file: str, trusted: Sequence[str] = ()) -> None:
        self.network: PooledNetwork = open_pooled(file, trusted)
        net = self.network.net.requires_grad_(False)
        self.sha256 = self._hash()
        self.name = f"{self.network.name}-{self.sha256[:SHORT]}"
        self.channels = net.channels
        self.widths = {"features": net.dim}
        self.class_names = self.network.class_names
        if self.class_names:
            self.widths["logits"] = len(self.class_names)

    def _hash(self) -> str:
        """Return the SHA-256 of everything that the features depend on: weights, features and input."""
        weights = digest(self.network.net.state_dict())
        text = json.dumps([weights, self.network.about], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def fingerprint(self) -> str:
        """Return the name, which ends in the start of the SHA-256."""
        return self.name

    def describe(self) -> dict[str, Any]:
        return {"features": self.network.about}

    def prepare(self, images: Tensor, labels: Tensor, device: torch.device) -> None:
        self.network.net.to(device)

    def extract(self, images: Tensor) -> Features:
        at_once = _AT_ONCE if images.device.type == "cpu" else max(len(images), 1)
        outputs = [self.network.read(to_float(part)) for part in images.split(at_once)]
        features = torch.cat([features for features, _ in outputs])
        if not self.class_names:
            return Features(features)
        return Features(features, torch.cat([logits for _, logits in outputs]))
