"""Networks as folders, on disk and on the Hugging Face Hub: config.json and model.safetensors.

config.json has the arguments of the constructor. It says nothing of a noise path or a prediction: a folder that makes
images by itself is written by `uvit-decay export`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub import PyTorchModelHubMixin
from torch import nn

from uvit_decay.runtime.errors import explained


class Pretrained(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="uvit_decay",
    paper_url="https://arxiv.org/abs/2404.10947",
    tags=["decayed-identity-shortcuts"],
):
    """A network with `from_pretrained`, `save_pretrained` and `push_to_hub` of huggingface_hub (abstract).

    Subclasses keep the arguments of their constructor in `config`. Loading is strict: a missing or a superfluous
    weight, and alphas of another decay, are refused. The network comes in eval mode.
    """

    config: dict[str, Any]
    # Not None, so that no network is built with a second copy of its arguments in it.
    _hub_mixin_config: ClassVar[dict[str, Any]] = {}

    def save_pretrained(self, save_directory: str | Path, *, config: Any = None, **options: Any) -> str | None:
        """Write config.json, model.safetensors and README.md; the options are huggingface_hub's."""
        return super().save_pretrained(save_directory, config=config or self.config, **options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | Path, **options: Any) -> nn.Module:
        """Return the network of a folder or of a repository; arguments of the constructor replace those stored."""
        # Any error is explained: a damaged file may raise anything.
        with explained(f"cannot load a {cls.__name__} from {pretrained_model_name_or_path}", Exception):
            loaded = super().from_pretrained(pretrained_model_name_or_path, **{**options, "strict": True})
            return loaded.eval()  # huggingface_hub 0.34 leaves it in training mode
