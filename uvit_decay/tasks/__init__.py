"""LightningModules that join a network and data for training, and auxiliary losses for them."""

from uvit_decay.terminal.program import lazy

MODULES = {
    "AuxiliaryLoss": "losses.auxiliary",
    "Task": "base",
    "ClassifyTask": "classify",
    "DiffusionTask": "diffusion",
    "DispersiveLoss": "losses.dispersive",
    "LayerSync": "losses.layersync",
    "MAETask": "mae",
    "Optimization": "optim.options",
    "REPA": "losses.repa",
}
__all__ = list(MODULES)
# The first use of a name imports all modules, so that a search for subclasses of Task or AuxiliaryLoss finds them.
__getattr__, __dir__ = lazy(__name__, MODULES, together=True)
