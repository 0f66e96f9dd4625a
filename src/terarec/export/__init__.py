# SPDX-License-Identifier: Apache-2.0
"""Trained models in the formats of other runtimes."""

from terarec.export.artifact import export_model, export_run
from terarec.export.graph_models import export_onnx
from terarec.export.inputs import NO_KEY, KeyInput
from terarec.export.table_rows import export_embeddings, export_table

__all__ = ["NO_KEY", "KeyInput", "export_embeddings", "export_model", "export_onnx", "export_run", "export_table"]
