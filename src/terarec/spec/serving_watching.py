# SPDX-License-Identifier: Apache-2.0
"""What a model server writes down about the calls that it answers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from terarec.spec import checks

_HTTP_URL = re.compile(r"https?://[^\s/?#@]+(/[^\s?#]*)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchingSpec:
    """Access log, served records and traces of a model server.

    Attributes:
        access_log: File to which a line of JSON is appended for each call, "-" for the standard output; None for no
            access log.
        access_log_share: Share of the calls that are logged.
        record_directory: Directory to which Parquet files of scored records are written; None for none.
        record_share: Share of the requests whose records are written, or compared with the training data.
        record_file_bytes: Size from which a file of records is complete, and another one begins.
        record_file_seconds: Age from which it is complete.
        otlp_endpoint: URL of a collector of OpenTelemetry that gets traces by OTLP over HTTP, such as
            "http://127.0.0.1:4318"; None for none.
        trace_share: Share of the calls whose spans are sent; of those that name a trace, the client says which.

    Raises:
        ConfigError: A value of another type or out of range.
    """

    access_log: str | None = None
    access_log_share: float = 1.0
    record_directory: str | None = None
    record_share: float = 0.01
    record_file_bytes: int = 64 * 2**20
    record_file_seconds: float = 300.0
    otlp_endpoint: str | None = None
    trace_share: float = 1.0

    def __post_init__(self) -> None:
        checks.instance(self, "access_log", str | None, "the path of a file, '-' or None")
        if self.access_log == "":
            checks.fail(self, "access_log", "the path of a file, '-' or None")
        checks.instance(self, "record_directory", str | None, "the path of a directory or None")
        if self.record_directory == "":
            checks.fail(self, "record_directory", "the path of a directory or None")
        for name in ("access_log_share", "record_share", "trace_share"):
            checks.finite_float(self, name, low=0.0, high=1.0, open_low=True)
        checks.positive_int(self, "record_file_bytes")
        checks.finite_float(self, "record_file_seconds", low=0.0, open_low=True)
        checks.instance(self, "otlp_endpoint", str | None, "a URL or None")
        if self.otlp_endpoint is not None and not _HTTP_URL.fullmatch(self.otlp_endpoint):
            checks.fail(self, "otlp_endpoint", "a URL such as http://127.0.0.1:4318")
