# SPDX-License-Identifier: Apache-2.0
"""The engine: the scores of serving are those of prediction, whoever calls and however often."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from terarec.errors import ConfigError, DataNotFoundError
from terarec.serve import InferenceSession, InputColumn
from terarec.train.predict import predict
from tests.errors import at
from tests.serve.conftest import CATEGORICAL, DENSE, TrainedRun


@pytest.fixture(scope="module")
def predicted(trained: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    out = tmp_path_factory.mktemp("predict") / "scores.parquet"
    predict(trained.path, trained.data, "valid", out)
    return pq.read_table(out)["score"].to_numpy()


def test_raw_records_score_as_prepared_ones(
    trained: TrainedRun, session: InferenceSession, predicted: np.ndarray
) -> None:
    scores = session.predict(trained.records(0, len(trained.lines)))
    assert scores.shape == (len(predicted), 1)
    assert scores.dtype == np.float32
    assert np.abs(scores[:, 0] - predicted).max() <= 1e-6
    assert predicted.std() > 0.01  # the model tells records apart


def test_a_record_scores_alone_as_in_company(trained: TrainedRun, session: InferenceSession) -> None:
    together = session.predict(trained.records(0, 20))
    alone = np.concatenate([session.predict(trained.records(row, row + 1)) for row in range(20)])
    assert np.abs(together - alone).max() <= 1e-6


def test_no_record_gives_no_score(trained: TrainedRun, session: InferenceSession) -> None:
    assert session.predict(trained.records(0, 0)).shape == (0, 1)


def test_columns_may_be_lists_arrays_or_arrow(trained: TrainedRun, session: InferenceSession) -> None:
    lists = trained.records(0, 30)
    arrow = {name: pa.array(values) for name, values in lists.items()}
    complete = {name: [0 if value is None else value for value in values] for name, values in lists.items()}
    arrays = {name: np.array(values) for name, values in complete.items()}
    assert np.array_equal(session.predict(lists), session.predict(arrow))
    assert np.array_equal(session.predict(complete), session.predict(arrays))


def test_null_and_empty_mean_missing(trained: TrainedRun, session: InferenceSession) -> None:
    records = trained.records(0, 5)
    empty = session.predict(records | {name: [""] * 5 for name in CATEGORICAL})
    null = session.predict(records | {name: [None] * 5 for name in CATEGORICAL})
    assert np.array_equal(empty, null)


def test_unseen_categories_share_the_rare_id(trained: TrainedRun, session: InferenceSession) -> None:
    records = trained.records(0, 5)
    one = session.predict(records | {"C1": ["deadbeef"] * 5})
    other = session.predict(records | {"C1": ["0badf00d"] * 5})
    assert np.array_equal(one, other)


def test_eight_threads_get_their_own_answers(trained: TrainedRun, session: InferenceSession) -> None:
    bounds = [(start, start + 1 + start % 7) for start in range(0, 400, 5)]
    expected = [session.predict(trained.records(*bound)) for bound in bounds]
    with ThreadPoolExecutor(8) as pool:
        scores = list(pool.map(lambda bound: session.predict(trained.records(*bound)), bounds))
    for got, right in zip(scores, expected, strict=True):
        assert np.array_equal(got, right)


def test_an_answer_says_the_step_of_its_weights(trained: TrainedRun, session: InferenceSession) -> None:
    records = trained.records(0, 5)
    scored = session.scored(records)
    assert np.array_equal(scored.scores, session.predict(records))
    assert scored.step == session.step > 0


def test_a_session_leaves_no_graph_and_no_gradient(trained: TrainedRun, session: InferenceSession) -> None:
    assert torch.is_grad_enabled()
    session.predict(trained.records(0, 5))
    assert torch.is_grad_enabled()
    embedding = session._weights.current.model.embedding
    assert not any(embedding.pending.gradients())
    assert all(not table.state_names for table in embedding.tables.values())  # no optimizer state was made


def test_a_session_describes_its_inputs_and_outputs(session: InferenceSession) -> None:
    assert session.inputs == (
        *(InputColumn(name=name, kind="number") for name in DENSE),
        *(InputColumn(name=name, kind="string") for name in CATEGORICAL),
    )
    assert session.labels == ("label",)
    assert session.run.model.kind == "dlrm"
    assert session.step > 0


def test_a_missing_column_is_named(trained: TrainedRun, session: InferenceSession) -> None:
    records = trained.records(0, 2)
    del records["I3"]
    with pytest.raises(ConfigError, check=at("column 'I3'")):
        session.predict(records)


def test_an_unknown_column_is_named(trained: TrainedRun, session: InferenceSession) -> None:
    with pytest.raises(ConfigError, check=at("column 'C27'")):
        session.predict(trained.records(0, 1) | {"C27": [""]})


def test_unequal_lengths_are_named(trained: TrainedRun, session: InferenceSession) -> None:
    with pytest.raises(ConfigError, check=at("column 'C2'")):
        session.predict(trained.records(0, 2) | {"C2": ["", "", ""]})


@pytest.mark.parametrize(("column", "values"), [("I1", ["many"]), ("C1", ["not hexadecimal"]), ("C1", ["123456789"])])
def test_an_unreadable_value_is_named(
    trained: TrainedRun, session: InferenceSession, column: str, values: list[str]
) -> None:
    with pytest.raises(ConfigError, check=at(f"column '{column}', row 0")):
        session.predict(trained.records(0, 1) | {column: values})


def test_a_directory_that_is_not_a_run_is_named(tmp_path: object) -> None:
    with pytest.raises(DataNotFoundError):
        InferenceSession.open(tmp_path)
