"""Read pickles of plain values and numpy arrays, of Python 2 and 3, without importing or calling what they name.

numpy does not unpickle either: `ndarray.__setstate__` and `dtype.__setstate__` crash on damaged or hostile states.
Stand-ins receive the states, and arrays are built from their bytes afterwards.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np

from uvit_decay.runtime.errors import UserError, explained


def read_dict(content: bytes, where: str, *keys: str) -> dict[str, Any]:
    """Return the dict in a pickle; its values may be numpy arrays of numbers. Python 2 text is decoded as latin1.

    Raises:
        UserError: the pickle names anything but numpy arrays, is damaged or holds no dict, or the dict lacks one of the
            `keys`. The message starts with `where`.
    """
    with explained(f"{where}: not a pickle, or damaged", Exception):  # damaged bytes raise nearly anything
        _check_memo(content)
        values = _Unpickler(content, where).load()
        if isinstance(values, dict):
            values = {key: value.array() if isinstance(value, _Array) else value for key, value in values.items()}
    if not isinstance(values, dict):
        raise UserError(f"{where}: a pickle of {type(values).__name__.strip('_')}, expected a dict")
    missing = [key for key in keys if key not in values]
    if missing:
        raise UserError(f"{where}: has no {' and no '.join(missing)}, only {str(list(values))[:200]}")
    return values


def _check_memo(content: bytes) -> None:
    """Raise a ValueError for an index beyond any that a pickle needs: the unpickler has a table as long as the largest.

    One of 2**28 takes gigabytes. Reading the opcodes of CIFAR's largest file takes a tenth of a second.
    """
    try:
        for count, (opcode, argument, place) in enumerate(pickletools.genops(content), 1):
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument > count:
                raise ValueError(f"it keeps a value as number {argument} at byte {place}")
    except ValueError as error:
        raise ValueError(f"{error}; truncated?") from error


class _Array:
    """Stand-in for numpy's array, its dtype and the functions that make arrays: their arguments and their state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.state = arguments, ()

    def __setstate__(self, state: tuple) -> None:
        self.state = state

    def array(self) -> np.ndarray:
        """Return the numpy array; raise a ValueError for arrays of objects."""
        if self.state:
            _, shape, dtype, fortran, content = self.state
        else:  # numpy's _frombuffer, which pickles of protocol 5 call
            content, dtype, shape, order = self.arguments
            fortran = order == "F"
        byte_order = dtype.state[1] if dtype.state else "="
        # latin1 maps each byte to one character, so the bytes of Python 2 arrays can be recovered from the text
        content = content.encode("latin1") if isinstance(content, str) else content
        flat = np.frombuffer(content, byte_order + dtype.arguments[0])  # ValueError for object dtypes
        return flat.reshape(shape, order="F" if fortran else "C")


def _encode(text: str, encoding: str) -> bytes:
    """Return latin1 text as bytes: stand-in for _codecs.encode, which Python 3 uses for bytes in protocol 2."""
    if encoding != "latin1":
        raise ValueError(f"bytes encoded as {encoding!r}")
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    """An unpickler that imports nothing: names without a stand-in are refused."""

    STAND_INS: dict[tuple[str, str], Callable] = {
        ("_codecs", "encode"): _encode,
        ("numpy", "dtype"): _Array,
        ("numpy", "ndarray"): _Array,
        ("numpy.core.multiarray", "_reconstruct"): _Array,  # numpy 1
        ("numpy._core.multiarray", "_reconstruct"): _Array,  # numpy 2
        ("numpy.core.numeric", "_frombuffer"): _Array,
        ("numpy._core.numeric", "_frombuffer"): _Array,
    }

    def __init__(self, content: bytes, where: str) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self.where = where

    def find_class(self, module: str, name: str) -> Callable:
        if (module, name) not in self.STAND_INS:
            raise UserError(f"{self.where} is a pickle that wants to run {f'{module}.{name}'[:200]}: refused")
        return self.STAND_INS[module, name]
