"""Diffusion transformers with decayed identity shortcuts: x <- alpha_l x + f_l(x)."""


def __getattr__(name: str) -> str:
    """Return `__version__` of the installed package, which pyproject.toml says; it is read when somebody asks."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version(__name__)
