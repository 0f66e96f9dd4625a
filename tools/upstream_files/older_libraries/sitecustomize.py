# SPDX-License-Identifier: Apache-2.0
"""Names of NumPy 1 that upstream's scripts use and NumPy 2 has dropped; Python imports this when it starts."""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np

_reshape = np.reshape


@wraps(_reshape)
def _with_old_keyword(a: Any, *args: Any, **options: Any) -> Any:
    if "newshape" in options:
        options["shape"] = options.pop("newshape")
    return _reshape(a, *args, **options)


np.reshape = _with_old_keyword
if "in1d" not in np.__dict__:
    np.in1d = np.isin  # of one axis, for which both give the same
for _name, _type in (("bool", bool), ("float", float), ("int", int), ("object", object)):
    if _name not in np.__dict__:
        setattr(np, _name, _type)
