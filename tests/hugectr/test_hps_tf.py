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
from terarec.hugectr.command_line import provide_modules
from terarec.hugectr.errors import WrongInputError
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
    """The package under HugeCTR's name."""
    # Before the names of modules are kept: what is imported meanwhile would be forgotten with them.
    importlib.import_module("terarec.hugectr.inference.tensorflow_layers")
    with mock.patch.dict(sys.modules):
        provide_modules()
        return importlib.import_module("hierarchical_parameter_server")


def test_a_model_with_a_layer_looks_up_and_is_saved(hps: Any, server_file: str, tmp_path: Path) -> None:
    import keras
    import tensorflow as tf

    assert hps.Init(global_batch_size=16, ps_config_file=server_file) == "OK"
    layer = hps.LookupLayer(model_name="demo", table_id=1, emb_vec_size=WIDTH, emb_vec_dtype=tf.float32)
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
def test_sparse_ids_are_combined_as_by_tf_nn(
    hps: Any, server_file: str, combiner: str | None, is_weighted: bool
) -> None:
    import tensorflow as tf

    layer = hps.SparseLookupLayer("demo", 0, WIDTH, tf.float32, ps_config_file=server_file)
    ids = tf.ragged.constant([[3, 3, 7], [], [49, 0]], dtype=tf.int64)
    weights = tf.ragged.constant([[0.5, 2.0, 1.0], [], [3.0, 1.0]]) if is_weighted else None
    expected = tf.nn.embedding_lookup_sparse(VECTORS, ids, weights, combiner=combiner, max_norm=1.5)
    for kind in (lambda one: one, lambda one: None if one is None else one.to_sparse()):
        found = layer(kind(ids), kind(weights), combiner=combiner, max_norm=1.5)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_layers_that_do_not_fit(hps: Any, server_file: str) -> None:
    import tensorflow as tf

    ids = tf.constant([[1, 2]])
    sparse = hps.SparseLookupLayer("demo", 0, WIDTH, ps_config_file=server_file)
    cases = (
        ("emb_vec_dtype", lambda: hps.LookupLayer("demo", 0, WIDTH, tf.float16, server_file)),
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
