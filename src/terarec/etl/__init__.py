"""Raw logs -> a data set by a workflow, and raw records -> model inputs with what it learnt. See docs/workflows.md."""

from terarec.etl.encoded_records import EncodedRecords
from terarec.etl.encoders import Encoders
from terarec.etl.vocabulary import Vocabulary

__all__ = ["EncodedRecords", "Encoders", "Vocabulary"]
