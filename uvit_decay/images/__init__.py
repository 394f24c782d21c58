"""Images outside of networks: writing them, and autoencoders of latents."""

from uvit_decay.runtime.program import lazy

MODULES = {
    "to_float": "io",
    "to_uint8": "io",
    "save_image": "io",
    "save_npz": "io",
    "save_pngs": "io",
    "labelled_grid": "io",
    "Autoencoder": "autoencoder",
    "LatentSpace": "autoencoder",
}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
