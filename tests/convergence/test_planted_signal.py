# SPDX-License-Identifier: Apache-2.0
"""Models come near the best AUC that a planted click model allows, on the path from Parquet to evaluation."""

import pytest

from terarec.spec import AdaGradSpec, AdamSpec, DLRMSpec, DynamicTablesSpec, RunSpec, TrainingSpec, WideDeepSpec
from terarec.train import build
from tests.train.planted import make_planted


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("planted")
    return directory, make_planted(directory, train=80_000, valid=10_000, rows_per_group=5_000).best_auc


MODELS = {
    "dlrm": DLRMSpec(width=8, bottom=(16, 8), top=(32,)),
    "dlrm-dynamic": DLRMSpec(width=8, bottom=(16, 8), top=(32,), tables=DynamicTablesSpec()),
    "wide_deep": WideDeepSpec(width=8, hidden=(32,), dropout=0.1),
}
ALWAYS = {("wide_deep", "fp32")}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=() if (name, precision) in ALWAYS else pytest.mark.slow)
        for name in MODELS
        for precision in ("fp32", "bf16")
    ],
)
def test_the_best_auc_is_nearly_reached(tmp_path, data, name, precision):
    directory, best_auc = data
    model = MODELS[name]
    training = TrainingSpec(batch_size=400, epochs=2, precision=precision)
    sparse, dense = AdaGradSpec(lr=0.05), AdamSpec(lr=0.006)
    spec = RunSpec(data=str(directory), model=model, sparse_optimizer=sparse, dense_optimizer=dense, training=training)
    evaluation = build(spec, tmp_path).fit().evaluation
    assert 0.97 * best_auc <= evaluation.auc <= best_auc + 0.01
    assert evaluation.logloss < 0.55
