# SPDX-License-Identifier: Apache-2.0
"""Compressed bodies: gzip, and deflate as HTTP means it (zlib)."""

from __future__ import annotations

import re
import zlib

from terarec.errors import ConfigError
from terarec.serve.protocol import RequestTooLargeError, UnsupportedContentError
from terarec.spec.checks import quoted

_LEAST_BYTES = 1024
"""Shorter responses are not compressed: that would take longer than sending them."""

_NEVER = re.compile(r"\s*q\s*=\s*0(\.0*)?\s*")  # the weight of an encoding that a client does not want

_ANY_FORMAT = 32 + zlib.MAX_WBITS
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def check_encoding(encoding: str) -> str:
    """Return a value of Content-Encoding in lower case.

    Raises:
        UnsupportedContentError: The server does not read it.
    """
    name = encoding.strip().lower()
    if name not in ("", "identity", *_WINDOW_BITS):
        raise UnsupportedContentError("Content-Encoding", f"got {quoted(name)}, expected identity, gzip or deflate")
    return name


def decompress(body: bytes | bytearray, encoding: str, most: int) -> bytes | bytearray:
    """Return the content of a body.

    Args:
        body: The body.
        encoding: Value of Content-Encoding; "" or "identity" for the body itself.
        most: Limit of the bytes of the content.

    Raises:
        UnsupportedContentError: The server does not read the encoding.
        RequestTooLargeError: The content has more bytes.
        ConfigError: The body is damaged, or continues behind its end.
    """
    encoding = check_encoding(encoding)
    if encoding not in _WINDOW_BITS:
        return body
    try:
        # Clients take the one for the other, and the first bytes tell them apart.
        stream = zlib.decompressobj(wbits=_ANY_FORMAT)
        content = stream.decompress(body, most + 1)
    except zlib.error as error:
        raise ConfigError("the body", f"got no {encoding} ({error}), expected what Content-Encoding says") from None
    if len(content) > most:
        raise RequestTooLargeError(
            "the body",
            f"got more than {most} bytes, decompressed, expected at most {most}; send fewer records at a time",
        )
    if not stream.eof or stream.unused_data:
        raise ConfigError("the body", f"got {encoding} that ends too early or too late, expected it whole")
    return content


def compress(body: bytes, accepted: str) -> tuple[bytes, str]:
    """Return a body as a client accepts it, and the encoding; "" for the body itself.

    Args:
        body: The body.
        accepted: Value of Accept-Encoding.
    """
    if len(body) < _LEAST_BYTES or not accepted:
        return body, ""
    parts = (part.partition(";") for part in accepted.lower().split(","))
    names = {name.strip() for name, _, weight in parts if not _NEVER.fullmatch(weight)}
    encoding = next((name for name in _WINDOW_BITS if name in names), "")
    if not encoding:
        return body, ""
    # The fastest level: others cost more time than the network saves.
    stream = zlib.compressobj(level=1, wbits=_WINDOW_BITS[encoding])
    return stream.compress(body) + stream.flush(), encoding
