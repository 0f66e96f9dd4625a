"""Serving: a trained run answers with scores for raw records.

`InferenceSession` is the engine and knows nothing of transport; `InferenceService` puts it behind the messages of
the Open Inference Protocol v2, and `serve` behind HTTP. `InferenceClient` sends requests.
`Recommender` retrieves items from an `ItemIndex` and ranks them.
"""

from terarec.serve.client import InferenceClient, InferenceError
from terarec.serve.item_index import FoundItems, ItemIndex
from terarec.serve.live import LiveUpdates, UpdateStatistics
from terarec.serve.publishing import PublishStatistics, ReceiveStatistics, UpdatePublisher, UpdateReceiver
from terarec.serve.recommend import Catalogue, Recommendations, Recommender, Towers
from terarec.serve.run import RunningServer, serve
from terarec.serve.score_files import ScoreReport, score_files
from terarec.serve.service import InferenceService
from terarec.serve.session import InferenceSession, InputColumn
from terarec.serve.tables import ServedTables
from terarec.serve.update_streams import KafkaTopic, RedisStream, open_stream

__all__ = [
    "Catalogue",
    "FoundItems",
    "InferenceClient",
    "InferenceError",
    "InferenceService",
    "InferenceSession",
    "InputColumn",
    "ItemIndex",
    "KafkaTopic",
    "LiveUpdates",
    "PublishStatistics",
    "ReceiveStatistics",
    "Recommendations",
    "Recommender",
    "RedisStream",
    "RunningServer",
    "ScoreReport",
    "ServedTables",
    "Towers",
    "UpdatePublisher",
    "UpdateReceiver",
    "UpdateStatistics",
    "open_stream",
    "score_files",
    "serve",
]
