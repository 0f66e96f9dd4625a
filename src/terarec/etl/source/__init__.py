"""Files of rows -> blocks of columns: delimited text, JSON lines, Parquet and Arrow, on a disk or behind a URL.

Described in docs/preparing.md. `open_source` opens them; a `Source` may be read as often as wanted.
"""

from terarec.etl.source.bad_input import FAULTS_SHOWN, BadInputReport, InputFault
from terarec.etl.source.files import SourceFile, find_files
from terarec.etl.source.raw_block import RawBlock
from terarec.etl.source.source import Source, open_source
from terarec.etl.source.times import parse_times

__all__ = [
    "FAULTS_SHOWN",
    "BadInputReport",
    "InputFault",
    "RawBlock",
    "Source",
    "SourceFile",
    "find_files",
    "open_source",
    "parse_times",
]
