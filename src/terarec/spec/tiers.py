# SPDX-License-Identifier: Apache-2.0
"""Budgets of the memories that hold the rows of a table."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from terarec.errors import ConfigError
from terarec.spec import checks

_UNITS = {
    "": 1,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B)?")
_EXPECTED = "a size such as '8GiB' or '512MiB'"
_WORDS = {"true": True, "false": False}
DEFAULT_HOST = "1GiB"
"""Host memory in front of a file where no budget is given."""


def parse_size(text: str, where: str = "size") -> int:
    """Return the bytes of a size such as ``"8GiB"``, ``"1.5GB"`` or ``"4096"``.

    Raises:
        ConfigError: Another text, or less than a byte.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size < 1:
        raise ConfigError(where, f"got {text!r}, expected {_EXPECTED}")
    return size


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiers:
    """Memories for the rows of tables, the fastest first; rows and their optimizer state move between them together.

    Rows that were trained most lately and often are in the fastest tier. The tables of a model that name equal tiers
    share their budgets. Results are the same as with all rows in one memory, bit for bit.

    Attributes:
        device: Memory of the device that computes, such as "8GiB"; None for none of its own. On a CPU it is a part of
            host memory in front of `host`.
        host: Memory of the host; None for none, or for 1 GiB where a `file` is given alone.
        file: Directory for the rows beyond these budgets; None to raise an error where they are full. Working memory
            of one process: the rows of a former one are removed at the start.
        direct: Whether the files bypass the system's page cache (O_DIRECT).
    """

    device: str | None = None
    host: str | None = None
    file: str | None = None
    direct: bool = False

    def __post_init__(self) -> None:
        checks.check_fields(self)
        for name in ("device", "host"):
            size = getattr(self, name)
            if size is None:
                continue
            try:
                # An empty text is no size: a number gets the same error as any other wrong value.
                parse_size(size if isinstance(size, str) else "")
            except ConfigError:
                checks.fail(self, name, f"{_EXPECTED}, or none")
        if self.file is not None and (not isinstance(self.file, str) or not self.file):
            checks.fail(self, "file", "the path of a directory, or none")
        if self.direct and self.file is None:
            checks.reject(self, "direct", "got direct access without a file, expected both")
        if self.device is None and self.host is None and self.file is None:
            checks.reject(self, "", "got no tier, expected device, host or file")

    @property
    def fast_name(self) -> str:
        """The field of the fastest tier's budget."""
        return "device" if self.device is not None else "host"

    @property
    def fast(self) -> str:
        """The budget of the fastest tier."""
        return self.device or self.host or DEFAULT_HOST

    @property
    def fast_bytes(self) -> int:
        """The bytes of the fastest tier."""
        return parse_size(self.fast)

    @property
    def host_bytes_below(self) -> int | None:
        """The bytes of host memory behind the device's; None for none."""
        return parse_size(self.host) if self.device is not None and self.host is not None else None

    @classmethod
    def parse(cls, text: str) -> Tiers:
        """Return the tiers that a text such as ``"host=2GiB,file=DIR"`` describes.

        Raises:
            ConfigError: Another text, or a value that a field does not take.
        """
        known = [field.name for field in fields(cls)]
        values: dict[str, Any] = {}
        # A directory with a comma in its name needs a configuration file.
        for part in text.split(","):
            name, equals, value = part.partition("=")
            if not equals or name not in known or name in values:
                raise ConfigError("tiers", f"got {text!r}, expected {'=,'.join(known)}= or some of them, each once")
            # Another word stays a text, which the check of the field rejects with what it accepts.
            values[name] = _WORDS.get(value, value) if name == "direct" else value
        return cls(**values)


def check_tiers(owner: object) -> None:
    """Raise unless ``owner.tiers`` are `Tiers` or None."""
    checks.instance(owner, "tiers", Tiers | None, "Tiers(device=..., host=..., file=...) or None")
