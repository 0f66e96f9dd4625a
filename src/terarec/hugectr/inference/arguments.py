# SPDX-License-Identifier: Apache-2.0
"""What scripts pass to lookups: integers, and DLPack capsules, whose tensors are used without taking them over."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from terarec.formats.integers import accepted_integers, integers_of_floats
from terarec.hugectr.errors import WrongInputError

_NAME = b"dltensor"  # of a capsule that nobody has taken over
_KINDS = "iuf"  # of DLPack's types 0 to 2
_CPU = 1


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.argtypes = (ctypes.py_object, ctypes.c_char_p)
_pointer_of.restype = ctypes.c_void_p


class _Memory:
    """The memory of a capsule, by the protocols of arrays in host memory and on a GPU.

    `from_dlpack` would take the capsule over, and a script could not read its results from it.
    """

    def __init__(self, capsule: object, content: _DLTensor) -> None:
        self._capsule = capsule  # owns the memory
        size = content.bits // 8
        interface: dict[str, Any] = {
            "version": 3,
            "typestr": f"<{_KINDS[content.code]}{size}",
            "shape": tuple(content.shape[: content.ndim]),
            "strides": tuple(size * step for step in content.strides[: content.ndim]) if content.strides else None,
            "data": ((content.data or 0) + content.byte_offset, False),
        }
        setattr(self, "__array_interface__" if content.device_type == _CPU else "__cuda_array_interface__", interface)


def borrowed(name: str, value: object) -> Tensor:
    """Return a tensor of the memory of `value`.

    Args:
        name: Parameter of the call, for errors.
        value: A DLPack capsule, which stays usable, or an object with ``__dlpack__``.

    Raises:
        WrongInputError: Neither, a capsule that was taken over, or one of another type than integers and floats.
    """
    if hasattr(value, "__dlpack__"):
        tensor: Tensor = from_dlpack(value)
        return tensor
    if not _is_valid(value, _NAME):
        expected = "a DLPack capsule that nobody has taken over, or an object with __dlpack__"
        raise WrongInputError("lookup_fromdlpack", name, f"got {value!r}, expected {expected}", field=name)
    content = _DLTensor.from_address(_pointer_of(value, _NAME))
    if content.code >= len(_KINDS) or content.lanes != 1:
        got = f"got a capsule of DLPack's type {content.code} with {content.bits} bits and {content.lanes} lanes"
        raise WrongInputError("lookup_fromdlpack", name, f"{got}, expected integers or floats", field=name)
    memory = _Memory(value, content)
    if content.device_type == _CPU:
        return torch.from_numpy(np.asarray(memory))
    return torch.as_tensor(memory, device=torch.device("cuda", content.device_id))


def int64_array(call: str, name: str, values: ArrayLike) -> NDArray[np.int64]:
    """Return integers of any width, or floats that hold integers, as an array int64 of the same shape.

    Args:
        call: The call, for errors.
        name: Its parameter.
        values: The numbers; an empty list, too.

    Raises:
        WrongInputError: Anything else, or floats beyond the integers that their type holds exactly.
    """
    try:
        array = np.asarray(values)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "iuf" and array.size:
        raise WrongInputError(call, name, f"got {array.dtype}{list(array.shape)}, expected integers", field=name)
    if array.dtype.kind != "f" or not array.size:
        return array.astype(np.int64)
    integers, is_wrong = integers_of_floats(array)
    is_wrong |= np.isnan(array)
    if is_wrong.any():
        problem = f"got {array[is_wrong][0]}, expected {accepted_integers(array.dtype)}"
        raise WrongInputError(call, name, problem, field=name)
    return integers
