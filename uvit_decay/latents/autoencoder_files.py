"""Loading of an autoencoder of diffusers, from the hub or a folder; each problem is a UserError of one line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from uvit_decay.files.diffusers_files import find_weights
from uvit_decay.files.writing import check_file
from uvit_decay.terminal.errors import UserError, explain

MOST_LAYERS = 1000  # of each block of an autoencoder
CONFIG = "config.json"  # of an autoencoder
PIPELINE_INDEX, PART = "model_index.json", "vae"  # of a pipeline: its index, and the folder of its autoencoder
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
FLOATING = frozenset({"F16", "BF16", "F32", "F64"})  # dtypes of safetensors


def find_in_pipeline(vae: str) -> str:
    """Return the autoencoder's folder if `vae` is the folder of a pipeline of diffusers, otherwise `vae`."""
    part = Path(vae) / PART
    if (Path(vae) / PIPELINE_INDEX).is_file() and (part / CONFIG).is_file():
        return str(part)
    return vae


def absolute_name(vae: str) -> str:
    """Return the absolute path of an autoencoder's folder; a hub id stays as it is."""
    folder = Path(vae)
    if folder.exists():
        return str(folder.resolve())
    if not HUB_ID.fullmatch(vae):
        raise UserError(f"the autoencoder {vae} cannot be loaded: no such folder; give a folder or a hub id with `vae`")
    return vae


def _check_exists(vae: str) -> None:
    """Raise an error unless this is a folder, or an autoencoder of the hub that is in the cache or can be reached.

    It makes one request; without a network, the loading of diffusers would repeat it for half a minute.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if Path(absolute_name(vae)).exists():
        return
    if not isinstance(try_to_load_from_cache(vae, CONFIG), str):
        get_hf_file_metadata(hf_hub_url(vae, CONFIG))


def load_autoencoder(vae: str) -> nn.Module:
    """Load an autoencoder of diffusers; raise a UserError if it is missing, incomplete or not supported."""
    import diffusers

    hint = "give a folder of diffusers with `vae`, or download it while there is a network"
    # Any error is explained: a damaged configuration can make diffusers raise anything.
    with explain(f"the autoencoder {vae} cannot be loaded", Exception, hint=hint):
        _check_exists(vae)
        config = diffusers.AutoencoderKL.load_config(vae)
        name = config.get("_class_name")
        kind = getattr(diffusers, str(name), None)
        if not _is_autoencoder(kind):
            known = "AutoencoderKL, AutoencoderDC and AutoencoderTiny"
            raise UserError(f"{vae}: {name} is not an autoencoder of diffusers; supported are {known}, for example")
        _check_sizes(config, vae)
        for file in _local_weights(vae):
            check_file(file)
        found = find_weights(Path(vae)) if Path(vae).is_dir() else None
        variant = None if found is None else found.variant
        net, info = kind.from_pretrained(vae, output_loading_info=True, variant=variant)
    missing = [*info["missing_keys"], *info["mismatched_keys"]]
    if missing:
        raise UserError(f"the autoencoder {vae} lacks {len(missing)} of its weights, the first is {missing[0]}")
    for file in _local_weights(vae):
        if file.suffix == ".safetensors":
            _check_floating(file)
    return net


def _local_weights(vae: str) -> list[Path]:
    """Return the files of weights in a folder; none for an autoencoder of the hub."""
    return [file for file in Path(vae).glob("*") if file.suffix in (".safetensors", ".bin")]


def _check_sizes(config: Mapping[str, Any], vae: str) -> None:
    """Raise a UserError for a number of a configuration that would make diffusers build layers without end."""
    for name, value in config.items():
        most = MOST_LAYERS if "layers" in name else 2**16
        numbers = value if isinstance(value, list | tuple) else [value]
        for number in numbers:
            if isinstance(number, int) and number > most:
                raise UserError(f"the configuration of the autoencoder {vae} is damaged: {name} is above {most:,}")


def _check_floating(file: Path) -> None:
    """Raise a UserError for quantised weights, which diffusers would cast without their scale."""
    with safe_open(file, "pt") as stored:
        dtypes = {stored.get_slice(name).get_dtype() for name in stored.keys()}  # noqa: SIM118
    others = dtypes - FLOATING
    if others:
        raise UserError(f"{file} has weights of the type {min(others)}; give floating-point weights")


def _is_autoencoder(kind: Any) -> bool:
    """Return whether this is a model class of diffusers that encodes and decodes."""
    import diffusers

    if not isinstance(kind, type) or not issubclass(kind, diffusers.ModelMixin):
        return False
    return callable(getattr(kind, "encode", None)) and callable(getattr(kind, "decode", None))
