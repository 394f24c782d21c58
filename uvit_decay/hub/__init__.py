"""Denoisers as folders of diffusers: what `DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)` loads."""

from uvit_decay.terminal.program import lazy

MODULES = {
    "export_folder": "folder",
    "DecayPipeline": "pipeline",
    "DecayedDenoiser": "denoiser",
    "UViTDenoiser": "denoiser",
    "SiTDenoiser": "denoiser",
}
__all__ = list(MODULES)
__getattr__, __dir__ = lazy(__name__, MODULES)
