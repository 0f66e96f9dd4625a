"""Trained models in the formats of other runtimes."""

from terarec.export.artifact import EXPORT_FILE, ExportReport, export_model, export_run
from terarec.export.graph_models import export_onnx
from terarec.export.inputs import NO_KEY, KeyInput
from terarec.export.layers import EXPORTED_KINDS
from terarec.export.table_rows import EmbeddingsReport, TableReport, export_embeddings, export_table, table_vectors

__all__ = [
    "EXPORTED_KINDS",
    "EXPORT_FILE",
    "NO_KEY",
    "EmbeddingsReport",
    "ExportReport",
    "KeyInput",
    "TableReport",
    "export_embeddings",
    "export_model",
    "export_onnx",
    "export_run",
    "export_table",
    "table_vectors",
]
