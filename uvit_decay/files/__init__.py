"""Files: atomic writing and locks, downloads, tensors, plain values and the classes that they name."""

__all__: list[str] = []
