# SPDX-License-Identifier: Apache-2.0
"""`JoinedScoring`: requests of any forms in one batch get their own scores or their own error."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from terarec.batch import Batch
from terarec.errors import ConfigError
from terarec.etl.workflow import Workflow
from terarec.etl.workflow.datasets import identity_workflow
from terarec.models import build_model
from terarec.serve import InferenceSession
from terarec.serve.columns import RecordColumns
from terarec.serve.joined_scoring import JoinedScoring
from terarec.serve.session import Scored
from terarec.spec import CategoricalColumn, DatasetSpec, DenseColumn, LabelColumn, RunSpec, WideDeepSpec
from tests.errors import at
from tests.serve.conftest import DENSE, TrainedRun

NEAR = {"rtol": 0, "atol": 1e-6}
"""Bound of what joining changes in a score: products of matrices are summed in another order."""


def scores_of(outcome: Scored | Exception) -> np.ndarray:
    assert isinstance(outcome, Scored), outcome
    return outcome.scores


def lines(trained: TrainedRun, start: int, stop: int) -> RecordColumns:
    return RecordColumns(trained.records(start, stop), stop - start)


def as_arrays(request: RecordColumns, dtype: type = np.float64) -> RecordColumns:
    """The same records, in the types in which binary tensors arrive."""
    columns = {
        name: np.array([np.nan if value is None else value for value in values], dtype=dtype)
        if name in DENSE
        else pa.array(values, type=pa.large_string())
        for name, values in request.columns.items()
    }
    return RecordColumns(columns, request.num_records)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 1, 200, 0, 2), (0,), (0, 0), (1,)])
def test_requests_of_one_form_get_their_own_scores(
    trained: TrainedRun, session: InferenceSession, sizes: tuple[int, ...]
) -> None:
    ends = np.cumsum(sizes).tolist()
    requests = [lines(trained, end - size, end) for size, end in zip(sizes, ends, strict=True)]
    scored = JoinedScoring(session)(requests)
    for request, outcome in zip(requests, scored.outcomes, strict=True):
        np.testing.assert_allclose(scores_of(outcome), session.predict(request.columns), **NEAR)
        assert outcome.step == session.step  # type: ignore[union-attr]


def test_requests_of_several_forms_get_their_own_scores(trained: TrainedRun, session: InferenceSession) -> None:
    requests = [
        lines(trained, 0, 2),
        as_arrays(lines(trained, 2, 5)),
        lines(trained, 5, 6),
        as_arrays(lines(trained, 6, 7), np.float32),
        as_arrays(lines(trained, 7, 300)),
    ]
    for request, outcome in zip(requests, JoinedScoring(session)(requests).outcomes, strict=True):
        np.testing.assert_allclose(scores_of(outcome), session.predict(request.columns), **NEAR)


def test_a_bad_value_ends_its_own_request(trained: TrainedRun, session: InferenceSession) -> None:
    requests = [lines(trained, start, start + 3) for start in (0, 3, 6)]
    requests[1].columns["C4"][2] = "no hexadecimal digits"  # type: ignore[index]
    first, bad, last = JoinedScoring(session)(requests).outcomes
    assert isinstance(bad, ConfigError)
    # The row is that of the request, and what it held does not stay in memory.
    assert at("column 'C4', row 2", "got 'no hexadecimal digits'")(bad)
    assert bad.__traceback__ is None
    assert bad.__context__ is None
    for request, outcome in zip(requests[::2], (first, last), strict=True):
        assert np.array_equal(scores_of(outcome), session.predict(request.columns))


class Moody(torch.nn.Module):
    """Fails for batches of an even number of records."""

    def forward(self, batch: Batch) -> torch.Tensor:
        if batch.batch_size % 2 == 0:
            raise RuntimeError("even")
        return batch.dense[:, :1].double()


def test_an_exception_of_the_model_ends_its_own_request(trained: TrainedRun, session: InferenceSession) -> None:
    workflow = Workflow.load(trained.path / "dataset" / "workflow")
    moody = InferenceSession(Moody(), workflow, session.run, workflow.dataset_spec(), step=1)
    sizes = (1, 2, 3)
    outcomes = JoinedScoring(moody)([lines(trained, 0, size) for size in sizes]).outcomes
    assert [isinstance(outcome, Scored) for outcome in outcomes] == [True, False, True]
    assert isinstance(outcomes[1], RuntimeError)


LISTS = DatasetSpec(
    name="lists",
    storage="parquet",
    labels=(LabelColumn(name="click"),),
    dense=(DenseColumn(name="price"),),
    categorical=(CategoricalColumn(name="tags", rows=9, hotness=3), CategoricalColumn(name="shop", rows=4)),
)


def test_lists_of_several_forms_are_joined() -> None:
    run = RunSpec(data="data", model=WideDeepSpec(width=4, hidden=(8,)))
    session = InferenceSession(build_model(run.model, LISTS, seed=1), identity_workflow(LISTS), run, LISTS, step=0)
    plain = {"price": [0.5, 1.0], "tags": [[1, 2, 3], []], "shop": [3, 0]}
    arrow = {
        "price": np.array([-2.0]),
        "tags": pa.array([[8, 8]], type=pa.large_list(pa.int64())),
        "shop": np.array([1]),
    }
    requests = [RecordColumns(plain, 2), RecordColumns(arrow, 1), RecordColumns(plain, 2), RecordColumns(arrow, 1)]
    for request, outcome in zip(requests, JoinedScoring(session)(requests).outcomes, strict=True):
        np.testing.assert_allclose(scores_of(outcome), session.predict(request.columns), **NEAR)
    bad = {"price": [0.5], "tags": [[1, 9]], "shop": [3]}
    found = JoinedScoring(session)([RecordColumns(bad, 1), RecordColumns(plain, 2)]).outcomes
    assert at("column 'tags', row 0")(found[0])  # type: ignore[arg-type]
    assert np.array_equal(scores_of(found[1]), session.predict(plain))
