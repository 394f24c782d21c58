"""Plain references: networks, training and sampling written the straightforward way that the official codes take.

Parameters have the official names, so that weights of this package load. Nothing here imports the package's networks
or samplers.
"""

from benchmarks.plain.mae import MAE
from benchmarks.plain.sit import SiT
from benchmarks.plain.uvit import UViT

__all__ = ["MAE", "SiT", "UViT"]
