"""Networks in pure torch, independent of diffusion and of Lightning: denoisers, encoders and masked autoencoders."""

from uvit_decay.terminal.program import lazy

MODULES = {
    "ImageNetwork": "base",
    "check_attributes": "base",
    "timestep_embedding": "embed",
    "HasIntermediates": "intermediates",
    "Layer": "intermediates",
    "pooled": "intermediates",
    "states_of": "intermediates",
    "MAE": "mae",
    "ResNet": "resnet",
    "SiT": "sit",
    "create_model": "sizes",
    "UViT": "uvit",
    "ViT": "vit",
}
__all__ = list(MODULES)
# The first use of a name imports all modules, so that a search for subclasses of ImageNetwork finds them.
__getattr__, __dir__ = lazy(__name__, MODULES, together=True)
