# SPDX-License-Identifier: Apache-2.0
"""Exceptions of code that users provide: functions and operators of workflows, models, callbacks and their modules.

Such an exception is reported with its place in that code, and is never called a defect in terarec.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

_OWN = f"{Path(__file__).parent}{os.sep}"
_STANDARD_LIBRARY = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_INSTALLED = frozenset({"site-packages", "dist-packages"})

_named: set[str] = set()
"""Packages that a workflow or run named; they may be installed like libraries."""


def note_import(module: str) -> None:
    """Take the package of a module for a user's, wherever it is installed."""
    _named.add(module.partition(".")[0])


def is_user_module(module: str) -> bool:
    """Return whether a module is none of terarec's."""
    return module.partition(".")[0] != "terarec"


def place_of(error: BaseException) -> str | None:
    """Return file, line and function of the innermost frame of a user's code in a traceback; None for none."""
    if isinstance(error, SyntaxError) and error.filename is not None and not error.filename.startswith(_OWN):
        return f"{Path(error.filename).name}:{error.lineno}"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_users(frame):
            return f"{Path(frame.f_code.co_filename).name}:{line}, in {frame.f_code.co_name}"
    return None


def describe(error: BaseException) -> str:
    """Return class, text and place of an exception, such as ``ValueError: no price (features.py:12, in price)``."""
    # A SyntaxError's own text has its place, too.
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    place = place_of(error)
    return f"{type(error).__name__}{f': {text}' if text else ''}{f' ({place})' if place else ''}"


def _is_users(frame: FrameType) -> bool:
    file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    if file.startswith((_OWN, "<")) or not is_user_module(module):
        return False
    if module.partition(".")[0] in _named:
        return True
    return not (file.startswith(_STANDARD_LIBRARY) or _INSTALLED & set(Path(file).parts))
