"""Calls take the names that HugeCTR's own bindings, of any release, have for their parameters."""

import inspect

import pytest

import terarec.hugectr as hugectr
from terarec.hugectr.data import DataSource
from terarec.hugectr.readers import DataReader
from terarec.hugectr.schema.table import forms as schema_forms
from terarec.hugectr.tools import DataGenerator
from terarec.hugectr.training_cache import TrainingCache

# The owner, its call, and each list of names that some release has for what it takes.
CALLS = [
    (hugectr, "Model", ["solver_parser opt_params", "solver reader_params opt_params etc_params", "mos_params"]),
    (
        hugectr.Model,
        "add",
        ["input", "sparse_embedding", "dense_layer", "group_dense_layer", "embedding_collection", "ebc_config"],
    ),
    (hugectr.Model, "compile", ["loss_names loss_weights"]),
    (hugectr.Model, "fit", ["num_epochs max_iter display eval_interval snapshot snapshot_prefix data_source_params"]),
    (hugectr.Model, "graph_to_json", ["graph_config_file"]),
    (hugectr.Model, "construct_from_json", ["graph_config_file include_dense_network"]),
    (hugectr.Model, "freeze_embedding", ["embedding_name"]),
    (hugectr.Model, "unfreeze_embedding", ["embedding_name"]),
    (hugectr.Model, "set_learning_rate", ["lr"]),
    (hugectr.Model, "train", ["is_first_batch"]),
    (hugectr.Model, "eval", ["is_first_batch", "eval_batch"]),
    (hugectr.Model, "check_out_tensor", ["tensor_name tensor_type"]),
    (hugectr.Model, "export_predictions", ["output_prediction_file_name output_label_file_name"]),
    (hugectr.Model, "save_params_to_files", ["prefix iter data_source_params"]),
    (hugectr.Model, "load_dense_weights", ["dense_model_file data_source_params"]),
    (hugectr.Model, "load_dense_optimizer_states", ["dense_opt_states_file data_source_params"]),
    (hugectr.Model, "load_sparse_weights", ["sparse_embedding_files data_source_params", "sparse_embedding_files_map"]),
    (hugectr.Model, "load_sparse_optimizer_states", ["sparse_opt_states_files", "sparse_opt_states_files_map"]),
    (hugectr.Model, "embedding_dump", ["path table_names"]),
    (hugectr.Model, "embedding_load", ["path table_names"]),
    (TrainingCache, "update", ["keyset_file", "keyset_file_list"]),
    (TrainingCache, "store", ["snapshot_file_list"]),
    (DataReader, "set_source", ["file_name"]),
    (DataReader, "set_file_list_source", ["file_list"]),
    (hugectr.Session, "evaluation", ["export_predictions_out_file export_labels_out_file"]),
    (hugectr.Session, "init_params", ["model_file"]),
    (hugectr.Session, "download_params_to_files", ["prefix iter"]),
    (hugectr.Session, "set_learning_rate", ["lr"]),
    (hugectr, "get_learning_rate_scheduler", ["configure_file"]),
    (hugectr, "SolverParser", ["file"]),
    (DataGenerator, "__init__", ["data_generator_params"]),
    (DataSource, "__init__", ["data_source_params"]),
]


@pytest.mark.parametrize(("owner", "call", "forms"), CALLS, ids=lambda value: getattr(value, "__name__", None))
def test_a_call_takes_the_names_of_every_release(owner, call, forms):
    taken = set(inspect.signature(getattr(owner, call)).parameters)
    for name in (call, f"Model.{call}", f"EmbeddingTrainingCache.{call}"):
        taken |= {alias for form in schema_forms().get(name, ()) for one in form.parameters for alias in one.aliases}
    assert {name for form in forms for name in form.split()} - taken == set()
