# SPDX-License-Identifier: Apache-2.0
"""URLs that stand in files: they are opened only where the caller allows it."""

from __future__ import annotations

from pathlib import Path

from terarec.errors import ConfigError
from terarec.io.remote import is_remote
from terarec.kernels import environment

_ONE_PLACE = frozenset({"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az"})
"""Types of URLs that all lead to the one service that the caller has credentials of, whatever their host is."""
_allowed: set[str] = set()


def allow_urls(*beginnings: str) -> None:
    """Allow this process to open URLs with these beginnings where a file names them."""
    _allowed.update(beginnings)


def check_url(path: str, named_by: str | Path) -> str:
    """Return `path`, which the file `named_by` names, if it is no URL or one that may be opened.

    A file behind a URL may name others in the same place, and every file may name a ``file://``.

    Raises:
        ConfigError: Another URL, and neither `allow_urls` nor ``TERAREC_ALLOW_URLS`` allows it.
    """
    place = _place(path)
    if place in ("", "file://") or (is_remote(named_by) and place == _place(str(named_by))):
        return path
    # A beginning such as s3://bucket does not allow s3://bucket-of-others.
    beginnings = {beginning.rstrip("/") for beginning in (*_allowed, *environment.allowed_urls())}
    if not any(path == beginning or path.startswith(f"{beginning}/") for beginning in beginnings):
        problem = f"names the URL {path}, which is not opened because a file says so"
        raise ConfigError(named_by, f"{problem}; {environment.ALLOW_URLS}={'/'.join(path.split('/')[:3])} allows it")
    return path


def _place(path: str) -> str:
    """Return type and host of a URL; empty for a path."""
    scheme, separator, rest = path.partition("://")
    if not separator:
        return ""
    # A chain such as simplecache::http://... is a place of its own.
    host = "" if scheme in _ONE_PLACE or scheme == "file" else rest.partition("/")[0]
    return path if "::" in path else f"{scheme}://{host}"
