# SPDX-License-Identifier: Apache-2.0
"""What a model server writes down about the calls that it answers."""

from __future__ import annotations

from dataclasses import dataclass

from terarec.spec import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchingSpec:
    """Access log of a model server.

    Attributes:
        access_log: File to which a line of JSON is appended for each call, "-" for the standard output; None for no
            access log.
        access_log_share: Share of the calls that are logged.

    Raises:
        ConfigError: A value of another type or out of range.
    """

    access_log: str | None = None
    access_log_share: float = 1.0

    def __post_init__(self) -> None:
        checks.instance(self, "access_log", str | None, "the path of a file, '-' or None")
        if self.access_log == "":
            checks.fail(self, "access_log", "the path of a file, '-' or None")
        checks.finite_float(self, "access_log_share", low=0.0, high=1.0, open_low=True)
