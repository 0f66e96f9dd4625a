"""Times as integers: which of them are seconds since 1970, and not milliseconds."""

from __future__ import annotations

FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799
"""The years 1 to 9999; milliseconds of any day since 1978 lie beyond."""

SECONDS = "seconds since 1970 in UTC, of the years 1 to 9999 (milliseconds are to be divided by 1000)"
"""What is accepted where an integer is a time."""
