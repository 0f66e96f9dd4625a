"""Models come near the best AUC that a planted click model allows, through the whole way from Parquet to evaluation."""

import pytest

from terarec.spec import AdaGradSpec, AdamSpec, DLRMSpec, DynamicTablesSpec, RunSpec, TrainingSpec, WideDeepSpec
from terarec.train import build
from tests.train.planted import make_planted


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("planted")
    return directory, make_planted(directory, train=80_000, valid=10_000, rows_per_group=5_000).best_auc


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "model",
    [
        DLRMSpec(width=8, bottom=(16, 8), top=(32,)),
        DLRMSpec(width=8, bottom=(16, 8), top=(32,), tables=DynamicTablesSpec()),
        WideDeepSpec(width=8, hidden=(32,), dropout=0.1),
    ],
    ids=["dlrm", "dlrm-dynamic", "wide_deep"],
)
def test_the_best_auc_is_nearly_reached(tmp_path, data, model, precision):
    directory, best_auc = data
    training = TrainingSpec(batch_size=400, epochs=2, precision=precision)
    sparse, dense = AdaGradSpec(lr=0.05), AdamSpec(lr=0.006)
    spec = RunSpec(data=str(directory), model=model, sparse_optimizer=sparse, dense_optimizer=dense, training=training)
    evaluation = build(spec, tmp_path).fit().evaluation
    assert 0.97 * best_auc <= evaluation.auc <= best_auc + 0.01
    assert evaluation.logloss < 0.55
