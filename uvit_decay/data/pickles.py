"""Read pickles of plain values and numpy arrays, of Python 2 and 3, without importing or calling what they name.

numpy does not unpickle either: `ndarray.__setstate__` and `dtype.__setstate__` crash on damaged or hostile states.
Stand-in classes receive the states, and arrays are built from their bytes afterwards.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from uvit_decay.runtime.errors import UserError, one_line


def read_dict(content: bytes, where: str, *keys: str) -> dict[str, Any]:
    """Return the dict in a pickle; its values may be numpy arrays of numbers. Python 2 text is decoded as latin1.

    Raises:
        UserError: the pickle names anything but numpy arrays, is damaged or holds no dict, or the dict lacks one of the
            `keys`. The message starts with `where`.
    """
    try:
        # latin1 maps each byte to one character, so the bytes of Python 2 arrays can be recovered from the text
        found = _Unpickler(io.BytesIO(content), encoding="latin1").load()
        if isinstance(found, dict):
            found = {key: value.array() if isinstance(value, _Array) else value for key, value in found.items()}
    except _RefusedError as refused:
        raise UserError(f"{where} is a pickle that wants to run {one_line(refused)}: refused") from None
    except Exception as error:  # damaged bytes raise nearly anything
        raise UserError(f"{where}: not a pickle, or damaged ({one_line(error)})") from error
    if not isinstance(found, dict):
        raise UserError(f"{where}: a pickle of {type(found).__name__.strip('_')}, expected a dict")
    missing = [key for key in keys if key not in found]
    if missing:
        raise UserError(f"{where}: has no {' and no '.join(missing)}, only {str(list(found))[:200]}")
    return found


class _RefusedError(Exception):
    """A pickle names something without a stand-in; the message is that name."""


class _DType:
    """Stand-in for numpy.dtype."""

    def __init__(self, name: str, align: bool = False, copy: bool = False) -> None:
        self.name, self.order = name, "="

    def __setstate__(self, state: tuple) -> None:
        self.order = state[1]


class _Array:
    """Stand-in for numpy.ndarray."""

    def __setstate__(self, state: tuple) -> None:
        _, self.shape, self.dtype, self.fortran, self.content = state

    def array(self) -> np.ndarray:
        """Return the numpy array with this state; raise a ValueError for arrays of objects."""
        content = self.content.encode("latin1") if isinstance(self.content, str) else self.content
        flat = np.frombuffer(content, self.dtype.order + self.dtype.name)  # ValueError for object dtypes
        return flat.reshape(self.shape, order="F" if self.fortran else "C")


def _reconstruct(subtype: type, shape: tuple, code: bytes) -> _Array:
    """Return an empty array, whose state follows in the pickle: stand-in for the numpy function."""
    return _Array()


def _frombuffer(content: bytes, dtype: _DType, shape: tuple, order: str) -> _Array:
    """Return an array of these bytes: stand-in for the numpy function that pickles of protocol 5 call."""
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", content))
    return array


def _encode(text: str, encoding: str) -> bytes:
    """Return latin1 text as bytes: stand-in for _codecs.encode, which Python 3 uses for bytes in protocol 2."""
    if encoding != "latin1":
        raise ValueError(f"bytes encoded as {encoding!r}")
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    """An unpickler that imports nothing: names without a stand-in are refused."""

    STAND_INS: dict[tuple[str, str], Callable] = {
        ("_codecs", "encode"): _encode,
        ("numpy", "dtype"): _DType,
        ("numpy", "ndarray"): _Array,
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,  # numpy 1
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,  # numpy 2
        ("numpy.core.numeric", "_frombuffer"): _frombuffer,
        ("numpy._core.numeric", "_frombuffer"): _frombuffer,
    }

    def find_class(self, module: str, name: str) -> Callable:
        if (module, name) not in self.STAND_INS:
            raise _RefusedError(f"{module}.{name}")
        return self.STAND_INS[module, name]
