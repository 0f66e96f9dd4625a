# SPDX-License-Identifier: Apache-2.0
"""Times in text, as ISO 8601 writes them."""

from __future__ import annotations

import re
from datetime import date

_ISO = re.compile(
    r"(\d{4})-?(\d\d)-?(\d\d)"
    r"(?:[Tt ](\d\d)(?::?(\d\d)(?::?(\d\d)(?:[.,](\d{1,9}))?)?)? ?(?:([Zz])|([+-])(\d\d)(?::?(\d\d))?)?)?",
    re.ASCII,
)
_EPOCH = date(1970, 1, 1).toordinal()
ACCEPTED_ISO = "a time in ISO 8601 such as 2024-05-01 or 2024-05-01T12:30:00.250+02:00"


def iso_time(text: str) -> tuple[int, int]:
    """Return the seconds since 1970 in UTC, rounded down, of a time in ISO 8601, and the nanoseconds of the second.

    Args:
        text: Date, or date and time, in UTC if it has no offset; up to nine digits of a second.

    Raises:
        ValueError: Another text, or no such time.
    """
    match = _ISO.fullmatch(text)
    if match is None:
        raise ValueError(f"got {text!r}, expected {ACCEPTED_ISO}")
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    _, sign, offset_hour, offset_minute = match.groups()[7:]
    hours, minutes = int(offset_hour or 0), int(offset_minute or 0)
    if max(hour, hours) > 23 or max(minute, second, minutes) > 59:
        raise ValueError(f"got {text!r}, expected {ACCEPTED_ISO}")
    offset = (hours * 60 + minutes) * (-60 if sign == "-" else 60)
    days = date(year, month, day).toordinal() - _EPOCH
    return ((days * 24 + hour) * 60 + minute) * 60 + second - offset, int((match[7] or "").ljust(9, "0"))
