# SPDX-License-Identifier: Apache-2.0
"""Names of a package that are imported on first use, so that importing the package loads no heavy library."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package (PEP 562), which import its names on first use.

    Type checkers read the names from imports under ``TYPE_CHECKING``, and must not see the functions: with a
    ``__getattr__`` a package has any name.

    Args:
        package: ``__name__`` of the package.
        homes: Module below the package -> its names that the package has, too.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def import_name(name: str) -> object:
        # Called for names that the package does not have yet.
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(importlib.import_module(f"{package}.{home_of[name]}"), name)
        # Kept, so that the next access costs no call.
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return import_name, list_names
