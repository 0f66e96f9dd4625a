# SPDX-License-Identifier: Apache-2.0
"""Every integer of a spec has a largest value: it starts threads, takes memory, indexes, or goes into 64 bits."""

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from terarec import spec
from terarec.data.feed import StreamOptions
from terarec.errors import ConfigError
from terarec.spec import TrainingSpec, checks
from terarec.spec.checks import FieldError
from terarec.spec.codec import hints_of, members
from terarec.spec.recipe import RECIPE_SPLITS
from tests.errors import at

INPUT = spec.SparseInput(name="a", nnz_per_slot=(1,), is_fixed_length=True)
SEQUENCE_SPECS = ("SequenceSpec", "AttentionSequenceSpec", "SASRecSpec", "BERT4RecSpec", "GRU4RecSpec", "HSTUSpec")
SEQUENCE_SPECS += ("YouTubeDNNSpec", "MultVAESpec")
WORKFLOW: dict[str, Any] = {
    "name": "a",
    "source": spec.SourceSpec(
        format="parquet",
        columns=(spec.SourceColumn(name="y", type="integer"), spec.SourceColumn(name="x", type="number")),
    ),
    "labels": (spec.LabelSpec(name="y"),),
    "dense": ("x",),
}
REQUIRED: dict[str, dict[str, Any]] = {
    **{name: {"item": "a", "history": "b"} for name in SEQUENCE_SPECS},
    **{name: {"user": "a", "item": "b"} for name in ("PairSpec", "MFBPRSpec", "NCFSpec")},
    "CategoricalColumn": {"name": "a"},
    "ClassWeights": {"negative": 1.0, "positive": 1.0},
    "CosineSchedule": {"t_max": 1},
    "CsvOptions": {"label": "a", "dense": ("b",)},
    **{
        name: {"sequences": (spec.TargetHistory(history="a", target="b"),)}
        for name in ("HistoriesSpec", "DIENSpec", "DINSpec", "BSTSpec", "HSTURankerSpec")
    },
    "DynamicTableSpec": {"name": "a", "width": 1},
    "FeatureSpec": {"name": "a", "table": "b"},
    "FilterAdmission": {"count": 1},
    "FrequencyAdmission": {"count": 1},
    "GraphFeature": {"name": "a", "table": "b"},
    "GraphLabel": {"name": "a"},
    "GraphSpec": {"labels": (spec.GraphLabel(name="a"),)},
    "IsotonicSpec": {"scores": ((0.5,),), "values": ((0.5,),), "step": 0},
    "LeaveOneOut": {"column": "a", "order": "b"},
    "LinearSchedule": {"t_max": 2},
    "MultiClassSpec": {"classes": 2},
    "MultiStepSchedule": {"milestones": (1,)},
    "PointerEvent": {"time": "2026-11-27T00:00:00Z", "action": "promote", "version": 1},
    "RecommendationSpec": {"items": "a", "key": "b"},
    "RecordLayout": {"label_dim": 1, "dense_dim": 0, "inputs": (INPUT,)},
    "RecordOptions": {"kind": "norm"},
    "RecordSplit": {"path": "a", "rows": 1},
    "RepositorySpec": {"path": "a"},
    "RowFileSpec": {"path": "a"},
    "SharedMemorySpec": {"name": "a"},
    "SavedModel": {"graph": Path("a"), "records": Path("a"), "dense": Path("a")},
    "ServedModelSpec": {"name": "a", "tables": (spec.ServedTableSpec(name="a", width=1),)},
    "ServedTableSpec": {"name": "a", "width": 1},
    "ShadowSpec": {"version": 1, "share": 0.5},
    "ShardSpec": {"file": "a", "rows": 1},
    "SparseInput": {"name": "a", "nnz_per_slot": (1,), "is_fixed_length": True},
    "RatedSequenceDataSpec": {"source": "https://a", "names": ("a",), "max_length": 1},
    "RecipeDataSpec": {
        "source": "https://a",
        "files": dict.fromkeys(RECIPE_SPLITS, ("a",)),
        "workflow": spec.WorkflowSpec(**WORKFLOW, split=spec.SplitByFiles(valid=1, test=1)),
    },
    "SpecificVersions": {"versions": (1,)},
    "SplitByUser": {"column": "a"},
    "SplitSpec": {"version": 1, "share": 0.5, "by": "a"},
    "StepSchedule": {"step_size": 1},
    "TTLEviction": {"steps": 1},
    "TableSpec": {"name": "a", "rows": 1, "width": 1},
    "TemperatureSpec": {"temperatures": (1.0,), "step": 0},
    "TwoTowerSpec": {"user": ("a",), "item": ("b",)},
    "VersionSpec": {
        "run": "a",
        "model": "dlrm",
        "step": 1,
        "data": "a",
        "made": "2026-11-27T00:00:00Z",
        "memory_bytes": 1,
        "files": {},
    },
    "WorkflowSpec": WORKFLOW,
}


def classes() -> list[type]:
    names = [name for name in sys.modules if name.startswith("terarec.spec.")]
    found = {value for name in names for _, value in inspect.getmembers(sys.modules[name], inspect.isclass)}
    found = {one for one in found if dataclasses.is_dataclass(one) and one.__module__.startswith("terarec.spec")}
    return sorted(found, key=lambda one: one.__qualname__)


FIELDS = [
    pytest.param(one, name, id=f"{one.__name__}.{name}")
    for one in classes()
    for name, hint in hints_of(one).items()
    if {int, tuple[int, ...]} & set(members(hint))
]


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_every_integer_has_a_largest_value(kind: type, field: str) -> None:
    """Finding Q2: numbers that start threads, allocate or index had no bound."""
    arguments = REQUIRED.get(kind.__name__, {})
    kind(**arguments)
    is_list = tuple[int, ...] in members(hints_of(kind)[field])
    with pytest.raises(FieldError) as caught:
        kind(**{**arguments, field: (2**63,) if is_list else 2**63})
    assert caught.value.field == field


def test_there_are_not_more_threads_than_a_machine_has() -> None:
    """Finding Q2: ``--threads 100000``, or the number in run.json, was a SIGSEGV."""
    for field in ("threads", "reader_threads"):
        TrainingSpec(**{field: checks.MOST_THREADS})
        with pytest.raises(FieldError, check=at(f"TrainingSpec.{field}", "from 1 to 1024")):
            TrainingSpec(**{field: 100_000})
    with pytest.raises(ConfigError, check=at("threads")):
        StreamOptions(batch_size=1, shuffle=False, seed=0, drop_last=False, repeat=False, threads=100_000, prefetch=0)


def test_what_is_accepted_names_the_largest_value_to_whom_it_concerns() -> None:
    for value, accepted in ((0, "an integer >= 1"), (2**63, f"from 1 to {2**63 - 1}")):
        with pytest.raises(FieldError, match=accepted):
            TrainingSpec(max_steps=value)
