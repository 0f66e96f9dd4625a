"""Files of rows -> blocks of columns: delimited text, JSON lines, Parquet and Arrow, on a disk or behind a URL.

Described in docs/preparing.md. `open_source` opens them; a `Source` may be read as often as wanted.
"""

from terarec.etl.source.blocks import FAULTS_SHOWN, BadInputReport, InputFault, RawBlock, SourceFile
from terarec.etl.source.source import Source, find_files, open_source

__all__ = [
    "FAULTS_SHOWN",
    "BadInputReport",
    "InputFault",
    "RawBlock",
    "Source",
    "SourceFile",
    "find_files",
    "open_source",
]
