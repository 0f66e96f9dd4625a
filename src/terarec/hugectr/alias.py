# SPDX-License-Identifier: Apache-2.0
"""The names of HugeCTR's packages for processes that a script or a notebook starts: ``terarec hugectr-alias``."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path

from terarec.errors import ConfigError, StorageError
from terarec.io.files import write_bytes
from terarec.io.opening import read_bytes

MODULES = Path(__file__).parent / "alias_modules"
"""Folder with a module for each name; a search path that has it finds HugeCTR's packages."""

_MARK = "# written by `terarec hugectr-alias`, which removes it with --remove\n"


def alias_file() -> Path:
    """Return the file in this Python's folder of packages that puts `MODULES` at the end of every search path."""
    return Path(sysconfig.get_path("purelib")) / "terarec_hugectr_alias.pth"


def install_alias() -> Path:
    """Make ``import hugectr`` find terarec in every process of this Python, and return the file that does.

    Raises:
        ConfigError: Another package of the name is installed, or a file of somebody else is in the way.
        StorageError: The folder of packages cannot be written.
    """
    installed = importlib.util.find_spec("hugectr")
    if installed is not None and installed.origin is not None and Path(installed.origin).parent != MODULES:
        raise ConfigError("hugectr", f"another package is installed in {installed.origin}, expected none of this name")
    path = alias_file()
    if path.exists():
        _check_own(path)
    write_bytes(path, f"{_MARK}{MODULES}\n".encode())
    return path


def remove_alias() -> Path:
    """Remove what `install_alias` wrote, and return its path.

    Raises:
        ConfigError: No alias is installed, or the file is not one.
        StorageError: The folder of packages cannot be written.
    """
    path = alias_file()
    if not path.exists():
        raise ConfigError("--remove", f"{path} does not exist, expected an installed alias")
    _check_own(path)
    try:
        path.unlink()
    except OSError as error:
        raise StorageError(path, f"cannot be removed: {error.strerror}") from error
    return path


def _check_own(path: Path) -> None:
    if not read_bytes(path).startswith(_MARK.encode()):
        raise ConfigError(path, "was not written by `terarec hugectr-alias`, expected its own file or none")
