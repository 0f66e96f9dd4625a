"""Columns of a spec found by their names in a file."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from terarec.errors import ConfigError, FormatError
from terarec.spec.quoting import did_you_mean

_SHOWN_CHARACTERS = 400


def check_names(path: str, wanted: Sequence[str], names: Sequence[str]) -> None:
    """Check that a file which names its columns has the wanted ones, each once.

    Raises:
        ConfigError: it lacks one.
        FormatError: it has one several times.
    """
    for name in wanted:
        if name not in names:
            listed = textwrap.shorten(", ".join(names), _SHOWN_CHARACTERS, placeholder=" ...")
            raise ConfigError(f"{path}: has no column {name!r}{did_you_mean(name, names)}, expected {listed}")
        if names.count(name) > 1:
            raise FormatError(f"{path}: names column {name!r} {names.count(name)} times, expected once")
