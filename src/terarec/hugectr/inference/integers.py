# SPDX-License-Identifier: Apache-2.0
"""Integers that scripts pass: keys and row pointers."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from terarec.formats.integers import accepted_integers, integers_of_floats
from terarec.hugectr.errors import WrongInputError


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
        found = np.asarray(values)
    except ValueError:  # lists of different lengths
        found = np.asarray(None)
    if found.dtype.kind not in "iuf" and found.size:
        raise WrongInputError(call, name, f"got {found.dtype}{list(found.shape)}, expected integers", field=name)
    if found.dtype.kind != "f" or not found.size:
        return found.astype(np.int64)
    integers, is_wrong = integers_of_floats(found)
    is_wrong |= np.isnan(found)
    if is_wrong.any():
        problem = f"got {found[is_wrong][0]}, expected {accepted_integers(found.dtype)}"
        raise WrongInputError(call, name, problem, field=name)
    return integers
