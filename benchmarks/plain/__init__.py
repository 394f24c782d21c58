"""Plain references: networks, training and sampling written the straightforward way that the official codes take.

Parameters have the official names, so that weights of this package load. Nothing here imports the package's networks
or samplers.
"""

from benchmarks.plain.mae import PlainMAE
from benchmarks.plain.sit import PlainSiT
from benchmarks.plain.uvit import PlainUViT

__all__ = ["PlainMAE", "PlainSiT", "PlainUViT"]
