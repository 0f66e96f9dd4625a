# SPDX-License-Identifier: Apache-2.0
"""Files of rows -> blocks of columns: delimited text, JSON lines, Parquet and Arrow, on a disk or behind a URL.

Described in docs/preparing.md. `open_source` opens them; a `Source` may be read as often as wanted.
"""
