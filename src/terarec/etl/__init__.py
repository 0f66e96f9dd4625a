"""Raw logs -> a data set, and raw records -> model inputs with what preparation learnt. Described in docs/encoders.md.

`criteo.prepare` prepares Criteo's logs; `table` any delimited text; `Encoders` is what the server uses.
"""

from terarec.etl.csv_options import CsvLayout, CsvOptions
from terarec.etl.encoded_records import EncodedRecords
from terarec.etl.encoders import Encoders
from terarec.etl.prepare_report import ColumnReport, PrepareReport
from terarec.etl.table import prepare_csv
from terarec.etl.vocabulary import Vocabulary

__all__ = [
    "ColumnReport",
    "CsvLayout",
    "CsvOptions",
    "EncodedRecords",
    "Encoders",
    "PrepareReport",
    "Vocabulary",
    "prepare_csv",
]
