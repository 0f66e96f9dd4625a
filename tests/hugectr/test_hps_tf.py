# SPDX-License-Identifier: Apache-2.0
"""Finding M14: HugeCTR's serving layers for TensorFlow, whose import takes seconds."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from terarec.formats.hugectr.weights import SparseRows, write_sparse_folder
from terarec.hugectr.alias import MODULES
from terarec.hugectr.command_line import provide_modules
from terarec.hugectr.errors import WrongInputError
from tests.processes import run_new_python
from tests.programs import lacks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None, reason=lacks("tensorflow", "pip install 'terarec[tensorflow]'")
    ),
]

ROWS, WIDTH = 50, 4
VECTORS = np.random.default_rng(0).standard_normal((2 * ROWS, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def server_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hps")
    for number in range(2):
        keys = np.arange(number * ROWS, (number + 1) * ROWS)
        write_sparse_folder(folder / f"table{number}", [SparseRows(keys, VECTORS[keys])])
    model: dict[str, Any] = {
        "model": "demo",
        "sparse_files": [str(folder / f"table{number}") for number in range(2)],
        "embedding_table_names": ["table0", "table1"],
        "embedding_vecsize_per_table": [WIDTH, WIDTH],
        "maxnum_catfeature_query_per_table_per_sample": [10, 10],
        "default_value_for_each_table": [0.0, 0.0],
        "deployed_device_list": [0],
        "max_batch_size": 256,
        "gpucache": False,
    }
    (folder / "ps.json").write_text(json.dumps({"supportlonglong": True, "models": [model]}))
    return str(folder / "ps.json")


@pytest.fixture(scope="module")
def hps() -> Any:
    return importlib.import_module("terarec.hugectr.hps_tf")


def test_a_model_with_a_layer_looks_up_and_is_saved(hps: Any, server_file: str, tmp_path: Path) -> None:
    import keras
    import tensorflow as tf

    assert hps.Init(global_batch_size=16, ps_config_file=server_file) == "OK"
    layer = hps.LookupLayer(model_name="demo", table_id=np.int64(1), emb_vec_size=WIDTH, emb_vec_dtype=tf.float32)
    ids = np.random.default_rng(1).integers(ROWS, 2 * ROWS, (6, 3))
    np.testing.assert_array_equal(layer(tf.constant(ids)), VECTORS[ids])
    inputs = keras.Input((3,), dtype="int64")
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(layer(inputs))))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again.predict(ids, verbose=0), model.predict(ids, verbose=0))
    long = np.linalg.norm(VECTORS[ids], axis=-1, keepdims=True)
    np.testing.assert_allclose(layer(ids, max_norm=0.5), VECTORS[ids] * np.minimum(1, 0.5 / long), rtol=1e-5)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn", None])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_sparse_ids_are_combined_and_samples_without_ids_are_zeros(
    hps: Any, server_file: str, combiner: str | None, is_weighted: bool
) -> None:
    import tensorflow as tf

    layer = hps.SparseLookupLayer("demo", 0, WIDTH, tf.float32, ps_config_file=server_file)
    ids, weights = [[3, 3, 7], [], [49, 0], []], [[0.5, 2.0, 1.0], [], [3.0, 1.0], []]
    expected = np.zeros((4, WIDTH))
    for sample in (0, 2):
        rows = VECTORS[ids[sample]].astype(np.float64)
        rows *= np.minimum(1, 1.5 / np.linalg.norm(rows, axis=1, keepdims=True))
        factors = np.asarray(weights[sample]) if is_weighted else np.ones(len(rows))
        total = {"sum": 1.0, "sqrtn": np.sqrt((factors**2).sum())}.get(combiner or "mean", factors.sum())
        expected[sample] = factors @ rows / total
    ragged = tf.ragged.constant(ids, dtype=tf.int64), tf.ragged.constant(weights) if is_weighted else None
    for kind in (lambda one: one, lambda one: None if one is None else one.to_sparse()):
        found = layer(*map(kind, ragged), combiner=combiner, max_norm=tf.Variable(1.5))
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_rows_are_combined_to_the_bit_as_by_tensorflow(hps: Any, server_file: str) -> None:
    """Upstream's own test compares with ``==``."""
    import tensorflow as tf

    ids = tf.ragged.constant([list(range(length)) for length in range(1, 40)]).to_sparse()
    layer = hps.SparseLookupLayer("demo", 0, WIDTH, ps_config_file=server_file)
    for combiner in ("sum", "mean", "sqrtn"):
        expected = tf.nn.embedding_lookup_sparse(VECTORS, ids, None, combiner=combiner, max_norm=1.5)
        np.testing.assert_array_equal(layer(ids, combiner=combiner, max_norm=1.5), expected)


SAVES_A_MODEL = """
import sys

import hierarchical_parameter_server as hps
import tensorflow as tf


class Served(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = hps.LookupLayer("demo", 1, 4, tf.float32)
        self.sparse = hps.SparseLookupLayer("demo", 0, 4, tf.float32, ps_config_file=sys.argv[2])

    def call(self, inputs):
        return self.dense(inputs[0]), self.sparse(sp_ids=inputs[1], sp_weights=None, combiner="sum")


model = Served()
model([tf.keras.Input((3,), dtype=tf.int64), tf.keras.Input((5,), sparse=True, dtype=tf.int64)])
model.save(sys.argv[1])
"""


@pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason=lacks("tf_keras", "pip install tf_keras"))
def test_a_saved_model_of_legacy_keras_is_made_without_a_server_and_runs_in_another_process(
    hps: Any, server_file: str, tmp_path: Path
) -> None:
    """Its lookups read the file where they run: a SavedModel of upstream's is made before the file is written."""
    import tensorflow as tf

    moved, environment = tmp_path / "moved.json", {"TF_USE_LEGACY_KERAS": "1", "PYTHONPATH": str(MODULES)}
    done = run_new_python(SAVES_A_MODEL, tmp_path / "model", moved, environment=environment)
    assert done.returncode == 0, done.stderr
    moved.write_text(Path(server_file).read_text())
    model = tf.saved_model.load(str(tmp_path / "model"))
    hps.Init(ps_config_file=server_file)
    ids, sparse = np.array([[50, 99, 51]]), tf.sparse.from_dense(np.array([[0, 7, 0, 3, 3]]))
    dense, combined = model([tf.constant(ids), sparse])
    np.testing.assert_array_equal(dense, VECTORS[ids])
    np.testing.assert_allclose(combined, VECTORS[[7, 3, 3]].sum(0, keepdims=True), rtol=1e-6)


def test_layers_that_do_not_fit(hps: Any, server_file: str) -> None:
    import tensorflow as tf

    ids = tf.constant([[1, 2]])
    sparse = hps.SparseLookupLayer("demo", 0, WIDTH, ps_config_file=server_file)
    cases = (
        ("emb_vec_dtype", lambda: hps.LookupLayer("demo", 0, WIDTH, tf.float16, server_file)),
        ("emb_vec_dtype", lambda: hps.LookupLayer("demo", 0, WIDTH, "float33", server_file)),
        ("table_id", lambda: hps.LookupLayer("demo", "0", WIDTH, ps_config_file=server_file)),
        ("table_id", lambda: hps.LookupLayer("demo", -1, WIDTH, ps_config_file=server_file)),
        ("emb_vec_size", lambda: hps.LookupLayer("demo", 0, 0, ps_config_file=server_file)),
        ("model_name", lambda: hps.LookupLayer(None, 0, WIDTH, ps_config_file=server_file)),
        ("ids", lambda: hps.LookupLayer("demo", 0, WIDTH, ps_config_file=server_file).call(tf.cast(ids, tf.float32))),
        ("emb_vec_size", lambda: hps.LookupLayer("demo", 0, 3, ps_config_file=server_file).call(ids)),
        ("table_id", lambda: hps.LookupLayer("demo", 2, WIDTH, ps_config_file=server_file).call(ids)),
        ("sp_ids", lambda: sparse.call(ids, None)),
        ("combiner", lambda: sparse.call(tf.sparse.from_dense(ids), None, combiner="max")),
    )
    for field, call in cases:
        with pytest.raises(WrongInputError) as caught:
            call()
        assert caught.value.field == field


def test_the_names_of_the_sparse_operation_kit_lead_to_the_plugin(hps: Any) -> None:
    importlib.import_module("terarec.tensorflow.variables")
    with mock.patch.dict(sys.modules):
        provide_modules()
        import sparse_operation_kit as sok
        from sparse_operation_kit import experiment

        import terarec.tensorflow

        assert sok is experiment is terarec.tensorflow
        assert sok.Variable([[1.0]]).shape == (1, 1)
