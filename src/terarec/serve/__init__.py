# SPDX-License-Identifier: Apache-2.0
"""Serving: a trained run answers with scores for raw records.

`InferenceSession` is the engine and knows nothing of transport; `ServedModel` puts it behind the messages of the Open
Inference Protocol v2 and joins requests into batches, `ServedModels` holds the models of a server, and `serve` puts
them behind HTTP. `InferenceClient` sends requests.
"""

from terarec.serve.client import InferenceClient, InferenceError
from terarec.serve.live import LiveUpdates, UpdateStatistics
from terarec.serve.models import ServedModels
from terarec.serve.publishing import PublishStatistics, ReceiveStatistics, UpdatePublisher, UpdateReceiver
from terarec.serve.run import RunningServer, serve
from terarec.serve.score_files import ScoreReport, score_files
from terarec.serve.served_model import ServedModel
from terarec.serve.session import InferenceSession, InputColumn, Scored
from terarec.serve.tables import ServedTables
from terarec.serve.update_streams import KafkaTopic, RedisStream, open_stream

__all__ = [
    "InferenceClient",
    "InferenceError",
    "InferenceSession",
    "InputColumn",
    "KafkaTopic",
    "LiveUpdates",
    "PublishStatistics",
    "ReceiveStatistics",
    "RedisStream",
    "RunningServer",
    "ScoreReport",
    "Scored",
    "ServedModel",
    "ServedModels",
    "ServedTables",
    "UpdatePublisher",
    "UpdateReceiver",
    "UpdateStatistics",
    "open_stream",
    "score_files",
    "serve",
]
