# SPDX-License-Identifier: Apache-2.0
"""HugeCTR's files as NumPy and Arrow data. Described in docs/hugectr-formats.md."""

from terarec.formats.dataset import read_file_list, write_file_list, write_parquet_metadata

__all__ = ["read_file_list", "write_file_list", "write_parquet_metadata"]
