"""Diffusion transformers with decayed identity shortcuts: x <- alpha_l x + f_l(x).

Public names are listed in `__all__`, here and in each subpackage, such as `uvit_decay.nn` and `uvit_decay.diffusion`.
`import uvit_decay` imports no subpackage and no torch: a name is imported when it is first used.
"""

from importlib import import_module
from typing import Any

SUBPACKAGES = (
    "callbacks",
    "checkpoint",
    "commands",
    "compare",
    "data",
    "decay",
    "diffusion",
    "doctor",
    "encoders",
    "evaluation",
    "files",
    "generation",
    "hub",
    "latents",
    "metrics",
    "nn",
    "representations",
    "runs",
    "runtime",
    "tasks",
    "terminal",
)
MODULES = {  # public name -> the subpackage or module that has it
    "UViT": "nn",
    "SiT": "nn",
    "MAE": "nn",
    "ViT": "nn",
    "ResNet": "nn",
    "create_model": "nn",
    "load": "checkpoint",
    "attach": "decay",
    "shortcuts": "decay",
    "effective_decay": "decay",
    "DiffusionTask": "tasks",
    "MAETask": "tasks",
    "ClassifyTask": "tasks",
    "Samples": "generation",
    "generate": "diffusion",
    "EMA": "callbacks",
    "LinearProbes": "callbacks",
    "GenerationMetrics": "callbacks",
    "Preview": "callbacks",
}
__all__ = ["__version__", *MODULES, *SUBPACKAGES]


def __getattr__(name: str) -> Any:
    """Import and return a public name or a subpackage; `__version__` is the version of the installed package."""
    if name == "__version__":
        from importlib.metadata import version

        return version(__name__)
    if name in SUBPACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names that are imported and all public names."""
    return sorted({*globals(), *__all__})
