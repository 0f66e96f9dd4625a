"""Serving: a trained run answers with scores for raw records.

`InferenceSession` is the engine and knows nothing of transport; `InferenceService` puts it behind the messages of
the Open Inference Protocol v2, and `serve` behind HTTP. `InferenceClient` asks a server.
"""

from terarec.serve.client import InferenceClient, InferenceError
from terarec.serve.live import LiveUpdates, UpdateStatistics
from terarec.serve.run import RunningServer, serve
from terarec.serve.score_files import ScoreReport, score_files
from terarec.serve.service import InferenceService
from terarec.serve.session import InferenceSession, InputColumn
from terarec.serve.tables import ServedTables

__all__ = [
    "InferenceClient",
    "InferenceError",
    "InferenceService",
    "InferenceSession",
    "InputColumn",
    "LiveUpdates",
    "RunningServer",
    "ScoreReport",
    "ServedTables",
    "UpdateStatistics",
    "score_files",
    "serve",
]
