"""Networks as folders, on disk and on the Hugging Face Hub: config.json and model.safetensors.

config.json has the arguments of the constructor. It says nothing of a noise path or a prediction: a folder that makes
images by itself is written by `python -m uvit_decay.checkpoint export`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin, hf_hub_download
from huggingface_hub.constants import CONFIG_NAME, SAFETENSORS_SINGLE_FILE
from torch import nn

from uvit_decay.decay import Shortcuts
from uvit_decay.runtime.errors import UserError, explained
from uvit_decay.runtime.instantiate import Spec, construct
from uvit_decay.runtime.plain import write_json
from uvit_decay.runtime.tensor_files import load_tensors, save_tensors

HOME = __name__.rpartition(".")[0]  # the classes here have arguments whose types are checked
CARD = """---
{{ card_data }}
---

# {{ network }}

{{ parameters }} parameters, [decayed identity shortcuts]({{ paper_url }}) with alphas from {{ first }} to {{ last }}.
This is the network alone, without what training and sampling know of it:

```python
from uvit_decay.nn import {{ network }}

net = {{ network }}.from_pretrained("FOLDER_OR_REPOSITORY")
```
"""


class Pretrained(
    nn.Module,
    PyTorchModelHubMixin,
    library_name="uvit_decay",
    paper_url="https://arxiv.org/abs/2404.10947",
    model_card_template=CARD,
    tags=["decayed-identity-shortcuts"],
):
    """A network with `from_pretrained`, `save_pretrained` and `push_to_hub` (abstract).

    Subclasses keep the arguments of their constructor in `config`, and their `shortcuts`. Loading is strict: a missing,
    a superfluous or a damaged weight, and alphas of another decay, are refused. The network comes in eval mode and in
    the dtypes of the file.
    """

    config: dict[str, Any]
    shortcuts: Shortcuts
    # Not None, so that no network is built with a second copy of its arguments in it.
    _hub_mixin_config: ClassVar[dict[str, Any]] = {}

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write config.json and model.safetensors."""
        write_json(save_directory / CONFIG_NAME, self.config)
        state = {name: value.detach().cpu() for name, value in self.state_dict().items()}
        hint = "of a sharded network, export a checkpoint of its run"
        with explained(f"cannot save the weights of this {type(self).__name__}", RuntimeError, hint=hint):
            save_tensors(save_directory / SAFETENSORS_SINGLE_FILE, state, {"format": "pt"})

    @classmethod
    def _from_pretrained(
        cls,
        *,
        model_id: str,
        config: dict[str, Any] | None = None,
        map_location: str | torch.device = "cpu",
        revision: str | None,
        cache_dir: str | Path | None,
        force_download: bool,
        local_files_only: bool,
        token: str | bool | None,
        proxies: dict[str, str] | None = None,  # this and the next are given by huggingface_hub before 1.0
        resume_download: bool | None = None,
        **arguments: Any,
    ) -> nn.Module:
        """Return the network of a local folder or of a repository; `arguments` replace those of its config.json."""
        if config is None:
            raise UserError(f"{model_id} has no {CONFIG_NAME}: it was not written by save_pretrained")
        if proxies or resume_download:
            raise UserError("proxies are set by HTTPS_PROXY, and downloads always resume: leave out both arguments")
        spec = Spec.of(cls, config | arguments)
        with torch.device("meta"):
            where = f"{CONFIG_NAME} of {model_id}"
            net = construct(cls, spec.init_args, spec.is_from(HOME), where, spec.class_path)
        file = Path(model_id) / SAFETENSORS_SINGLE_FILE
        if not Path(model_id).is_dir():
            fetched = hf_hub_download(
                model_id,
                SAFETENSORS_SINGLE_FILE,
                revision=revision,
                cache_dir=cache_dir,
                force_download=force_download,
                local_files_only=local_files_only,
                token=token,
            )
            file = Path(fetched)
        state = {name: value.clone() for name, value in load_tensors(file)[1].items()}  # free of the mapped file
        if missing := net.state_dict().keys() - state.keys():
            raise UserError(f"{file} lacks {len(missing)} of the weights of a {cls.__name__}, such as {min(missing)}")
        with explained(f"{file} does not fit the network of its {CONFIG_NAME}", RuntimeError):
            net.load_state_dict(state, assign=True)
        return net.eval().to(map_location)

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """Return the README.md of the folder."""
        own = {
            "network": type(self).__name__,
            "parameters": f"{sum(parameter.numel() for parameter in self.parameters()):,}",
            "first": f"{self.shortcuts.alphas[0]:.4g}",
            "last": f"{self.shortcuts.alphas[-1]:.4g}",
        }
        return super().generate_model_card(*args, **own | kwargs)
