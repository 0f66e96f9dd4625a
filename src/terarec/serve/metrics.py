# SPDX-License-Identifier: Apache-2.0
"""`Metrics`: what the models of a server count, in the text format of Prometheus.

Nothing is counted here: each scrape reads the counters that models, tables and updates have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from terarec.errors import ConfigError, MissingDependencyError
from terarec.serve.input_drift import DriftWatch, ModelDrift, drift_of_served
from terarec.serve.live import LiveUpdates
from terarec.serve.metric_samples import Combination, MetricSamples
from terarec.serve.models import ServedModels
from terarec.serve.protocol import UnknownModelError
from terarec.serve.recommending import RecommendationService, RecommendationStatistics
from terarec.serve.served_model import ServedModel
from terarec.serve.sinks import Sink
from terarec.serve.statistics import (
    DIFFERENCES,
    DURATION_BOUNDS_NS,
    BatchCount,
    ErrorCounts,
    ModelStatistics,
    ShadowStatistics,
)
from terarec.serve.statistics_board import WorkerStatistics
from terarec.serve.tables import ServedRun

try:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingDependencyError(error.name, "not installed, expected pip install 'terarec[serve]'") from error

CONTENT_TYPE = CONTENT_TYPE_LATEST

_MODEL = ("model", "version")
_TABLE = (*_MODEL, "table")
_TIER = (*_TABLE, "level", "tier")

_DURATIONS: Sequence[tuple[str, str, str]] = (
    ("request", "terarec_request_duration_seconds", "Time from the arrival of a request to its scores"),
    ("queue", "terarec_queue_duration_seconds", "Time that a request waited for its batch"),
    ("compute_input", "terarec_compute_input_duration_seconds", "Time of the workflow for the batch of a request"),
    ("compute_infer", "terarec_compute_infer_duration_seconds", "Time of look-ups and layers for a request's batch"),
    ("compute_output", "terarec_compute_output_duration_seconds", "Time to hand the scores of a batch to its requests"),
)
"""Stage of `ModelStatistics.durations`, name of its histogram, and what it has."""

# Alerts rest on these: a rate needs the series from its beginning, before the first of them.
_ERRORS = {(protocol, reason): 0 for protocol in ("http", "grpc") for reason in ("busy", "internal")}
_BATCH_BOUNDS = tuple(2**power for power in range(17))
_DURATION_BOUNDS = tuple(bound / 1e9 for bound in DURATION_BOUNDS_NS)
_RECOMMENDING = "terarec_recommendation_duration_seconds"

_HISTOGRAMS: Mapping[str, tuple[str, Sequence[str], Sequence[float]]] = {
    **{name: (text, _MODEL, _DURATION_BOUNDS) for _, name, text in _DURATIONS},
    "terarec_batch_records": ("Records of a batch", _MODEL, _BATCH_BOUNDS),
    "terarec_shadow_difference": (
        "Absolute differences of the scores of a version that does not answer from those of answers",
        _MODEL,
        DIFFERENCES,
    ),
    _RECOMMENDING: ("Time of requests for recommendations, by stage", ("stage",), _DURATION_BOUNDS),
}
"""Name -> what it has, its labels, and the upper bounds of its ranges."""

_OTHERS: Mapping[str, tuple[Combination, str, Sequence[str]]] = {
    "terarec_errors": ("counter", "Answers that are errors, by protocol and reason", ("protocol", "reason")),
    "terarec_sink_written": ("counter", "Items that a sink, such as the access log, has written", ("sink",)),
    "terarec_sink_lost": ("counter", "Items that a sink has not written, by reason", ("sink", "reason")),
    "terarec_input_drift": (
        "highest",
        "Population stability index of what is scored against the training data",
        (*_MODEL, "column"),
    ),
    "terarec_input_drift_records": ("lowest", "Records that the drift of the inputs rests on", _MODEL),
    "terarec_requests": ("counter", "Requests by outcome", (*_MODEL, "outcome")),
    "terarec_rejected_requests": ("counter", "Requests that got no scores, by reason", (*_MODEL, "reason")),
    "terarec_records": ("counter", "Records scored", _MODEL),
    "terarec_queue_requests": ("sum", "Requests that wait for a batch", _MODEL),
    "terarec_batch_delay_seconds": ("highest", "Time that a request waits for others at present", _MODEL),
    "terarec_model_states": ("highest", "1 for the state that a version of a model is in", (*_MODEL, "state")),
    "terarec_request_share": (
        "highest",
        "Share of the requests without a version that one answers, or scores without answering, by role",
        (*_MODEL, "role"),
    ),
    "terarec_shadow_requests": (
        "counter",
        "Requests that a version was to score without answering, by outcome",
        (*_MODEL, "outcome"),
    ),
    "terarec_shadow_records": ("counter", "Records that a version has scored without answering", _MODEL),
    "terarec_shadow_largest_difference": ("highest", "Largest difference of its scores from those of answers", _MODEL),
    "terarec_weights_step": ("lowest", "Training steps of the weights that score", _MODEL),
    "terarec_weights_behind_seconds": ("highest", "Age of the newest checkpoint that is not served yet, or 0", _MODEL),
    "terarec_deltas": ("counter", "Deltas that were applied", _MODEL),
    "terarec_snapshots": ("counter", "Times that all rows were loaded anew", _MODEL),
    "terarec_updated_rows": ("counter", "Rows that deltas have set", _MODEL),
    "terarec_unwritten_rows": ("sum", "Rows of deltas that are in memory, since no tier has them yet", _MODEL),
    "terarec_rejected_updates": ("counter", "Updates that were rejected", _MODEL),
    "terarec_recommendation_requests": ("counter", "Requests for recommendations by outcome", ("outcome",)),
    "terarec_recommendation_users": ("counter", "Users that got recommendations", ()),
    "terarec_recommendation_items": ("highest", "Items that are recommended from", ()),
    "terarec_table_keys": ("counter", "Keys looked up in the tiers of a table", _TABLE),
    "terarec_table_default_keys": ("counter", "Keys that got the default vector", _TABLE),
    "terarec_tier_keys": ("counter", "Keys looked up in a tier", _TIER),
    "terarec_tier_hits": ("counter", "Keys found in a tier", _TIER),
    "terarec_tier_hit_rate": ("highest", "Share of the keys that a tier had", _TIER),
    "terarec_tier_available": ("lowest", "1 if look-ups read a tier, 0 while it rests after an error", _TIER),
    "terarec_tier_errors": ("counter", "Operations on a tier that failed", _TIER),
    "terarec_cache_keys": ("counter", "Keys looked up in the cache of a table", _TABLE),
    "terarec_cache_hits": ("counter", "Keys found in the cache", _TABLE),
    "terarec_cache_hit_rate": ("highest", "Share of the keys that the cache had", _TABLE),
    "terarec_cache_rows": ("sum", "Rows in the cache", _TABLE),
    "process_virtual_memory_bytes": ("highest", "Virtual memory of the process", ()),
    "process_resident_memory_bytes": ("highest", "Physical memory of the process", ()),
    "process_start_time_seconds": ("highest", "Time at which the process began, since 1970", ()),
    "process_cpu_seconds": ("counter", "Processor time of the process", ()),
    "process_open_fds": ("highest", "Open files of the process", ()),
    "process_max_fds": ("lowest", "Limit of its open files", ()),
}
"""Name -> "counter", or how the gauges of several workers become one, what it has, and its labels; the text adds
"_total" to the names of counters."""

_RATES = {
    "terarec_tier_hit_rate": ("terarec_tier_hits", "terarec_tier_keys"),
    "terarec_cache_hit_rate": ("terarec_cache_hits", "terarec_cache_keys"),
}
"""Name of a rate -> the counters that it is made of."""


class Metrics:
    """The metrics of a server's models, and of its process. Thread-safe.

    Args:
        models: The models.
        errors: Answers that are errors; None for none.
        sinks: Where something about requests goes.
        drift: What compares records with the training data; None for nothing.
        recommendations: What answers requests for recommendations; None where nothing does.
        workers: The other workers of the server, whose values are added, as they get these; None for no others.
    """

    def __init__(
        self,
        models: ServedModels,
        errors: ErrorCounts | None = None,
        sinks: Sequence[Sink] = (),
        drift: DriftWatch | None = None,
        recommendations: RecommendationService | None = None,
        workers: WorkerStatistics | None = None,
    ) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._workers = workers
        collector = _ServerCollector(models, errors, sinks, drift, recommendations, workers)
        self._registry.register(collector)
        if workers is not None:
            workers.samples = collector.own_samples

    def text(self) -> bytes:
        """Return the present values in the text format of Prometheus, of `CONTENT_TYPE`."""
        return generate_latest(self._registry)

    def close(self) -> None:
        """Give the other workers no further values."""
        if self._workers is not None:
            self._workers.samples = None


class _ServerCollector(Collector):
    """Reads the counters of models and of the transport; arguments are those of `Metrics`."""

    def __init__(
        self,
        models: ServedModels,
        errors: ErrorCounts | None,
        sinks: Sequence[Sink],
        drift: DriftWatch | None,
        recommendations: RecommendationService | None,
        workers: WorkerStatistics | None,
    ) -> None:
        self._models = models
        self._workers = workers
        self._process = ProcessCollector(registry=None)
        self._recommendations = recommendations
        self._errors = errors
        self._sinks = sinks
        self._drift = drift

    def collect(self) -> Iterable[Metric]:
        families = _Families()
        self._add_own(families)
        for model in self._ready_models():
            _add_requests(families, (model.name, model.version), model.statistics())  # of all workers
        if self._drift is not None:
            others = () if self._workers is None else self._workers.other_drift()
            for of_model in drift_of_served(self._drift, self._models, others):
                _add_drift(families, of_model)
        if self._workers is not None:
            families.samples.merge(self._workers.other_samples())
        return families

    def own_samples(self) -> MetricSamples:
        """Return the values of this process but for the statistics and the drift of models, which are of all."""
        families = _Families()
        self._add_own(families)
        return families.samples

    def _add_own(self, families: _Families) -> None:
        for place, count in ({} if self._errors is None else _ERRORS | self._errors.read()).items():
            families.add("terarec_errors", place, count)
        for sink in self._sinks:
            counted = sink.counts()
            families.add("terarec_sink_written", (sink.label,), counted.written)
            for reason, count in counted.lost.items():
                families.add("terarec_sink_lost", (sink.label, reason), count)
        names = list(dict.fromkeys(state.name for state in self._models.index()))
        for name in names:
            for one in self._models.roles(name):
                families.add("terarec_request_share", (name, one.version, one.role), one.share)
        if (router := self._models.router) is not None:
            for name in names:
                _add_shadow(families, name, router.statistics(name))
        if self._recommendations is not None:
            _add_recommendations(families, self._recommendations.statistics())
        for state in self._models.index():
            families.add("terarec_model_states", (state.name, state.version, state.state), 1)
        for model in self._ready_models():
            _add_model(families, model)
        for family in self._process.collect():
            for sample in family.samples:
                families.add(family.name, (), sample.value)

    def _ready_models(self) -> Iterator[ServedModel]:
        for state in self._models.index():
            if state.state != "READY":
                continue
            try:
                model = self._models.get(state.name, state.version)
            except UnknownModelError:  # it was unloaded in the meantime
                continue
            yield model


class _Families:
    """The metrics by name, with the values of all models."""

    def __init__(self) -> None:
        self.samples = MetricSamples()

    def __iter__(self) -> Iterator[Metric]:
        for rate, (hits, keys) in _RATES.items():
            known = self.samples.of(hits)
            for place, (count,) in self.samples.of(keys).items():
                self.add(rate, place, known[place][0] / count if count else 0.0)
        families: dict[str, HistogramMetricFamily | CounterMetricFamily | GaugeMetricFamily] = {
            name: HistogramMetricFamily(name, f"{text}.", labels=names)
            for name, (text, names, _) in _HISTOGRAMS.items()
        }
        for name, (how, text, names) in _OTHERS.items():
            kind = CounterMetricFamily if how == "counter" else GaugeMetricFamily
            families[name] = kind(name, f"{text}.", labels=names)
        for (name, labels), values in self.samples:
            family = families[name]
            if isinstance(family, HistogramMetricFamily):
                *counts, total = values
                bounds = (*map(str, _HISTOGRAMS[name][2]), "+Inf")
                family.add_metric(labels, list(zip(bounds, accumulate(counts), strict=True)), total)
            else:
                family.add_metric(labels, values[0])
        yield from families.values()

    def add(self, name: str, labels: Sequence[str], value: float) -> None:
        self.samples.add(name, labels, (value,), _OTHERS[name][0])

    def add_histogram(self, name: str, labels: Sequence[str], counts: Sequence[int], total: float) -> None:
        """Add the numbers of values in each range, of which the last one is beyond all bounds, and their sum."""
        self.samples.add(name, labels, (*counts, total), "counter")


def _add_recommendations(families: _Families, counted: RecommendationStatistics) -> None:
    for stage, counts in counted.durations.items():
        families.add_histogram(_RECOMMENDING, (stage,), counts, counted.times_ns[stage] / 1e9)
    for outcome, count in counted.requests.items():
        families.add("terarec_recommendation_requests", (outcome,), count)
    families.add("terarec_recommendation_users", (), counted.users)
    families.add("terarec_recommendation_items", (), counted.items)


def _add_model(families: _Families, model: ServedModel) -> None:
    labels = (model.name, model.version)
    families.add("terarec_queue_requests", labels, model.num_waiting)
    families.add("terarec_batch_delay_seconds", labels, model.delay_seconds)
    families.add("terarec_weights_step", labels, model.session.step)
    if model.updates is not None:
        _add_updates(families, labels, model.updates)
    if model.session.served is not None:
        _add_tables(families, labels, model.session.served)


def _add_drift(families: _Families, drift: ModelDrift) -> None:
    labels = (drift.model, drift.version)
    families.add("terarec_input_drift_records", labels, drift.records)
    for column in drift.inputs:
        if column.stability_index is not None:
            families.add("terarec_input_drift", (*labels, column.name), column.stability_index)


def _add_shadow(families: _Families, name: str, counted: ShadowStatistics) -> None:
    if not counted.version:
        return
    labels = (name, counted.version)
    for outcome, count in (("success", counted.requests), ("dropped", counted.dropped), ("error", counted.failed)):
        families.add("terarec_shadow_requests", (*labels, outcome), count)
    families.add("terarec_shadow_records", labels, counted.records)
    families.add("terarec_shadow_largest_difference", labels, counted.max_difference)
    families.add_histogram("terarec_shadow_difference", labels, counted.differences, counted.sum_difference)


def _size_counts(batches: Mapping[int, BatchCount]) -> Sequence[int]:
    """Return the numbers of batches within each of `_BATCH_BOUNDS`, and beyond."""
    counts = [0] * (len(_BATCH_BOUNDS) + 1)
    for size, batch in batches.items():
        # 2^n is the last size within the bound of place n.
        counts[min(max(size - 1, 0).bit_length(), len(_BATCH_BOUNDS))] += batch.count
    return counts


def _add_requests(families: _Families, labels: Sequence[str], counted: ModelStatistics) -> None:
    for stage, name, _ in _DURATIONS:
        spent_ns = counted.success_ns if stage == "request" else getattr(counted.times, stage)
        families.add_histogram(name, labels, counted.durations[stage], spent_ns / 1e9)
    families.add_histogram("terarec_batch_records", labels, _size_counts(counted.batches), counted.records)
    families.add("terarec_requests", (*labels, "success"), counted.succeeded)
    families.add("terarec_records", labels, counted.records)
    # A rate needs the series from its beginning, so that they are there before the first failure.
    for reason in dict.fromkeys(("rejected", "expired", "cancelled", "error", *counted.failed)):
        count = counted.failed.get(reason, 0)
        families.add("terarec_requests", (*labels, reason), count)
        if reason in ("rejected", "expired"):
            name = {"rejected": "queue_full", "expired": "deadline"}[reason]
            families.add("terarec_rejected_requests", (*labels, name), count)


def _add_updates(families: _Families, labels: Sequence[str], updates: LiveUpdates) -> None:
    counted = updates.statistics()
    families.add("terarec_weights_behind_seconds", labels, updates.behind_seconds())
    families.add("terarec_deltas", labels, counted.deltas)
    families.add("terarec_snapshots", labels, counted.snapshots)
    families.add("terarec_updated_rows", labels, counted.rows)
    families.add("terarec_unwritten_rows", labels, counted.unwritten)
    families.add("terarec_rejected_updates", labels, counted.rejected)


def _add_tables(families: _Families, labels: Sequence[str], served: ServedRun) -> None:
    try:
        tables = served.statistics()
    except ConfigError:  # another version replaced it in the meantime; the next scrape finds that
        return
    for name, use in tables.items():
        table = (*labels, name)
        families.add("terarec_table_keys", table, use.tiers.keys)
        families.add("terarec_table_default_keys", table, use.tiers.defaults)
        for level, tier in enumerate(use.tiers.tiers):
            place, keys, hits = (*table, str(level), tier.name), tier.counted.keys, tier.counted.hits
            families.add("terarec_tier_keys", place, keys)
            families.add("terarec_tier_hits", place, hits)
            families.add("terarec_tier_available", place, tier.is_available)
            families.add("terarec_tier_errors", place, tier.errors)
        if use.cache is not None:
            families.add("terarec_cache_keys", table, use.cache.keys)
            families.add("terarec_cache_hits", table, use.cache.hits)
            families.add("terarec_cache_rows", table, use.cache.rows)
