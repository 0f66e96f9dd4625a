"""Code that a description names as ``"package.module:name"``, and whether it may be imported.

A run or a workflow from another party could run any code, so it is imported only where the caller allows
its package.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from terarec.errors import ConfigError


def imported(name: str) -> Callable[..., Any]:
    """Import the function or class that ``"package.module:name"`` names.

    Raises:
        ConfigError: There is none.
    """
    module, _, path = name.partition(":")
    try:
        found = functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"function {name!r}", f"cannot be imported ({error}), expected 'package.module:name'"
        ) from None
    if not callable(found):
        raise ConfigError(f"function {name!r}", "is no function")
    result: Callable[..., Any] = found
    return result


def check_allowed(name: str, allow_import: Sequence[str], what: str) -> None:
    """Raise unless the code that `name` names is of a package that is allowed, and defined in one.

    Nothing is imported for code that is rejected by its name. A module that is not installed is no error here.

    Args:
        name: ``"package.module:name"``.
        allow_import: Packages and modules, such as "shop" or "shop.features"; what lies below them is allowed too.
        what: The thing that names it and where, for the error.

    Raises:
        ConfigError: Names the thing, and what would allow it.
    """
    if isinstance(allow_import, str):
        raise ConfigError("allow_import", f"got the text {allow_import!r}, expected a list of packages")
    module = name.partition(":")[0]
    top = module.partition(".")[0]
    if not _is_within(module, allow_import):
        raise ConfigError(
            what,
            f"not run, as its package is not allowed; --allow-import {top} allows it, in Python "
            f"allow_import=({top!r},)",
        )
    if not _is_there(module):
        return
    home = getattr(imported(name), "__module__", None)
    if not isinstance(home, str) or not _is_within(home, allow_import):
        allowed = ", ".join(allow_import)
        raise ConfigError(what, f"defined in {home}, expected a function that is defined in what is allowed: {allowed}")


def _is_within(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _is_there(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if _is_within(module, [error.name or ""]):
            return False
        raise ConfigError(f"module {module!r}", f"{error}, expected one that can be imported") from None
    return True
