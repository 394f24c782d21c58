"""Read pickles of plain values and numpy arrays, of Python 2 and 3, without running what they name.

numpy is kept out of it too: `ndarray.__setstate__` and `dtype.__setstate__` crash on damaged or hostile states. Here
stand-ins take the states, and arrays are made of their bytes afterwards.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from uvit_decay.errors import UserError, one_line


def read_dict(content: bytes, where: str, *keys: str) -> dict[str, Any]:
    """The dict that a pickle holds, numpy arrays of numbers among its values; text of Python 2 is read as latin1.

    Raises UserError that starts with `where`: it names something else than numpy's arrays, it is damaged, it holds no
    dict, or the dict lacks one of the `keys`.
    """
    try:
        # latin1: the bytes of arrays that Python 2 wrote must survive as text
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
    """The name that a pickle wanted to call."""


class _DType:
    """Stands for numpy.dtype."""

    def __init__(self, name: str, align: bool = False, copy: bool = False) -> None:
        self.name, self.order = name, "="

    def __setstate__(self, state: tuple) -> None:
        self.order = state[1]


class _Array:
    """Stands for numpy.ndarray."""

    def __setstate__(self, state: tuple) -> None:
        _, self.shape, self.dtype, self.fortran, self.content = state

    def array(self) -> np.ndarray:
        content = self.content.encode("latin1") if isinstance(self.content, str) else self.content
        flat = np.frombuffer(content, self.dtype.order + self.dtype.name)  # refuses objects
        return flat.reshape(self.shape, order="F" if self.fortran else "C")


def _reconstruct(subtype: type, shape: tuple, code: bytes) -> _Array:
    """Stands for numpy's: an empty array, whose state follows."""
    return _Array()


def _frombuffer(content: bytes, dtype: _DType, shape: tuple, order: str) -> _Array:
    """Stands for numpy's, which pickles of protocol 5 name."""
    array = _Array()
    array.__setstate__((1, shape, dtype, order == "F", content))
    return array


def _encode(text: str, encoding: str) -> bytes:
    """Stands for _codecs.encode, by which Python 3 writes bytes in protocol 2."""
    if encoding != "latin1":
        raise ValueError(f"bytes encoded as {encoding!r}")
    return text.encode("latin1")


class _Unpickler(pickle.Unpickler):
    """Whatever else a pickle names is not even imported."""

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
