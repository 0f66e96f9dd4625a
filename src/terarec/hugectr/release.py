# SPDX-License-Identifier: Apache-2.0
"""The releases of HugeCTR, and the one whose behaviour scripts get where releases differ.

``--compat-release`` or ``TERAREC_HUGECTR_RELEASE`` selects it; notebooks and child processes have the variable alone.
Otherwise a call behaves as in the newest release that has it.
"""

from __future__ import annotations

from terarec.errors import ConfigError
from terarec.kernels.environment import HUGECTR_RELEASE, hugectr_release

RELEASES = (
    "2.3", "3.0", "3.1", "3.2", "3.3", "3.4", "3.5", "3.6", "3.7", "3.8", "3.9", "4.0", "4.1", "4.2", "4.3",
    "23.02", "23.04", "23.05", "23.06", "23.08", "23.09", "23.12", "24.04", "24.06", "25.03",
)  # fmt: skip
OLDEST, NEWEST = RELEASES[0], RELEASES[-1]


def release_number(release: str) -> tuple[int, int]:
    """Return a release such as "25.03" as a comparable pair of numbers."""
    major, minor = map(int, release.split("."))
    return major, minor


def selected_release() -> str | None:
    """Return the release that the user selected; None for the newest that has a call.

    Raises:
        ConfigError: ``TERAREC_HUGECTR_RELEASE`` names no release.
    """
    release = hugectr_release()
    if release is not None and release not in RELEASES:
        raise ConfigError(HUGECTR_RELEASE, f"got {release!r}, expected one of {', '.join(RELEASES)}")
    return release


def release_of(since: str = OLDEST, until: str = NEWEST) -> tuple[int, int]:
    """Return the number of the release that a call follows: the selected one, within those that have the call.

    Raises:
        ConfigError: ``TERAREC_HUGECTR_RELEASE`` names no release.
    """
    number = release_number(selected_release() or until)
    return min(max(number, release_number(since)), release_number(until))
