# SPDX-License-Identifier: Apache-2.0
"""Files as NumPy and Arrow data: shards, ``dataset.json``, tensor containers. Described in docs/formats.md."""

# Their modules add the formats of shards, which are looked up by name.
import terarec.formats.parquet
import terarec.formats.raw  # noqa: F401
from terarec.formats.dataset import read_dataset, write_dataset
from terarec.formats.parts import write_parts

__all__ = ["read_dataset", "write_dataset", "write_parts"]
