# SPDX-License-Identifier: Apache-2.0
"""The parts of schemas that are code, named by the TOML files: rules, older forms and derived values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from terarec.hugectr.enums import (
    Database_t,
    DatabaseType_t,
    DataReaderSparse_t,
    DataReaderType_t,
    Embedding_t,
    FileSystemType_t,
    Optimizer_t,
    TrainPSType_t,
    Update_t,
)
from terarec.hugectr.release import NEWEST, OLDEST, selected_release
from terarec.hugectr.schema.types import CLASSES
from terarec.parallel import available_threads
from terarec.spec.registry import Registry

ParameterValues = Mapping[str, Any]
Args = Sequence[Any]

_LEAST_BLOCK = 512  # bytes of a disk's sector; a smaller number in its position is a number of requests


RULES: Registry[Callable[[ParameterValues], str | None]] = Registry("rule")
"""Rules of calls: each gets the values of all parameters and returns what is wrong with them together, or None."""

OLDER_FORMS: Registry[Callable[[Args, ParameterValues], bool]] = Registry("older form")
"""Tests of older forms: each gets positional and keyword arguments and returns whether they are of the form."""

DERIVED: Registry[Callable[[ParameterValues], ParameterValues]] = Registry("derived values")
"""Values of objects besides their parameters: each gets the values of these."""

# The solver and optimizers


@RULES.register()
def _decay_has_steps(values: ParameterValues) -> str | None:
    if values["decay_start"] and not values["decay_steps"]:
        return f"decay_steps: got 0 with decay_start={values['decay_start']}, expected at least 1"
    return None


@RULES.register()
def _one_precision(values: ParameterValues) -> str | None:
    if values["use_mixed_precision"] and values["enable_tf32_compute"]:
        return "got use_mixed_precision and enable_tf32_compute, expected one of them at most"
    return None


@RULES.register()
def _no_overlap_in_epochs(values: ParameterValues) -> str | None:
    overlaps = [name for name, value in values.items() if name.endswith("_iteration_overlap") and value]
    if overlaps and not values["repeat_dataset"]:
        return f"got {overlaps[0]} with repeat_dataset=False, expected no overlap in epochs"
    return None


@RULES.register()
def _batches_are_divisible(values: ParameterValues) -> str | None:
    # HugeCTR cuts a batch evenly over the GPUs.
    devices = sum(len(node) for node in values["vvgpu"])
    if not devices:
        return f"vvgpu: got {values['vvgpu']}, expected at least one device"
    for name in ("batchsize", "batchsize_eval"):
        if values[name] % devices:
            return f"{name}: got {values[name]}, expected a multiple of the {devices} devices of vvgpu"
    return None


@OLDER_FORMS.register()
def _starts_with_a_seed(args: Args, kwargs: ParameterValues) -> bool:
    # Releases 3.1 and 3.2 have no model_name: their first position is the seed's.
    return bool(args) and isinstance(args[0], int)


@OLDER_FORMS.register()
def _is_oldest_release(args: Args, kwargs: ParameterValues) -> bool:
    # Training files of 2.3 have what only the function of 3.0 takes: iterations and intervals.
    return selected_release() == OLDEST and "display" not in kwargs


@DERIVED.register()
def _release_of_solver(values: ParameterValues) -> ParameterValues:
    return {"compat_release": values["compat_release"] or selected_release() or NEWEST}


@DERIVED.register()
def _release_of_session(values: ParameterValues) -> ParameterValues:
    return {"compat_release": OLDEST if selected_release() == OLDEST else "3.0"}


@RULES.register()
def _lazy_is_adams(values: ParameterValues) -> str | None:
    if values["update_type"] is Update_t.LazyGlobal and values["optimizer_type"] is not Optimizer_t.Adam:
        return f"update_type: got LazyGlobal with {values['optimizer_type'].name}, expected it with Adam alone"
    return None


@OLDER_FORMS.register()
def _has_no_ftrl(args: Args, kwargs: ParameterValues) -> bool:
    # Ftrl's three numbers came between; for another optimizer the first of them says nothing unless it is 0.
    return len(args) > 2 and args[0] is not Optimizer_t.Ftrl and args[2] != 0


# Readers and inputs


@RULES.register()
def _keyset_for_each_source(values: ParameterValues) -> str | None:
    sources, keysets = values["source"], values["keyset"]
    if keysets and len(keysets) != len(sources):
        return f"keyset: got {len(keysets)} files, expected one for each of the {len(sources)} sources"
    return None


@OLDER_FORMS.register()
def _has_block_size(args: Args, kwargs: ParameterValues) -> bool:
    # The third position was the block's size up to 4.0; since 23.02 there are nine, two of which choose the layout.
    has_nine = len(args) > 7 or {"multi_hot_reader", "is_dense_float"} & set(kwargs)
    is_block = len(args) > 2 and isinstance(args[2], int) and args[2] >= _LEAST_BLOCK
    return (is_block and not has_nine) or "io_block_size" in kwargs


@OLDER_FORMS.register()
def _is_before_3_9(args: Args, kwargs: ParameterValues) -> bool:
    # Up to 3.8 the first parameter is a flag, `use_hdfs`; from 3.9 on it is the kind of the file system.
    return bool(args and isinstance(args[0], bool)) or bool(kwargs and not {"source", "server"} & set(kwargs))


@DERIVED.register()
def _new_data_source(values: ParameterValues) -> ParameterValues:
    source = FileSystemType_t.HDFS if values["use_hdfs"] else FileSystemType_t.Local
    return {"source": source, "server": values["namenode"]}


@RULES.register()
def _every_slot_has_a_number(values: ParameterValues) -> str | None:
    hotness, slots = values["nnz_per_slot"], values["slot_num"]
    if len(hotness) not in (1, slots):
        return f"nnz_per_slot: got {len(hotness)} numbers, expected one, or one for each of the {slots} slots"
    return None


@DERIVED.register()
def _keys_of_each_slot(values: ParameterValues) -> ParameterValues:
    hotness = values["nnz_per_slot"]
    return {"nnz_per_slot": [*hotness] * values["slot_num"] if len(hotness) == 1 else [*hotness]}


@OLDER_FORMS.register()
def _starts_with_a_type(args: Args, kwargs: ParameterValues) -> bool:
    # 2.3 and 3.0 begin with the distribution over GPUs; later releases with the name.
    return bool(args) and isinstance(args[0], DataReaderSparse_t)


@DERIVED.register()
def _keys_of_old_slots(values: ParameterValues) -> ParameterValues:
    return {"nnz_per_slot": [values["max_nnz"]] * values["slot_num"]}


@RULES.register()
def _names_match_dims(values: ParameterValues) -> str | None:
    names, dims = values["label_names"], values["label_dims"]
    weights = values.get("label_weights", dims)
    if len(names) != len(dims) or len(set(names)) != len(names):
        return f"label_names: got {names}, expected a distinct name for each of the {len(dims)} label_dims"
    if len(weights) != len(dims):
        return f"label_weights: got {len(weights)} numbers, expected one for each of the {len(dims)} label_dims"
    return None


@RULES.register()
def _names_match_inputs(values: ParameterValues) -> str | None:
    names, inputs = values["sparse_names"], values["data_reader_sparse_param_array"]
    if len(names) != len(inputs):
        return f"sparse_names: got {names}, expected a name for each of the {len(inputs)} sparse inputs"
    return None


@DERIVED.register()
def _one_label(values: ParameterValues) -> ParameterValues:
    return {"label_dims": [values["label_dim"]], "label_names": [values["label_name"]], "label_weights": [1.0]}


@OLDER_FORMS.register()
def _has_tasks(args: Args, kwargs: ParameterValues) -> bool:
    # From 3.5 on the first parameter may be a list, one number for each task.
    return "label_dims" in kwargs or bool(args and isinstance(args[0], list | tuple))


@OLDER_FORMS.register()
def _has_weights(args: Args, kwargs: ParameterValues) -> bool:
    has_labels = "label_weights" in kwargs or (len(args) > 2 and isinstance(args[2], list | tuple))
    return _has_tasks(args, kwargs) and has_labels


@DERIVED.register()
def _equal_weights(values: ParameterValues) -> ParameterValues:
    return {"label_weights": [1.0] * len(values["label_dims"])}


@OLDER_FORMS.register()
def _has_sparse_names(args: Args, kwargs: ParameterValues) -> bool:
    # 3.1 alone: 3.0 has these names as well, behind the location of the data.
    return "sparse_names" in kwargs and not _has_reader_type(args, kwargs)


@DERIVED.register()
def _named_inputs(values: ParameterValues) -> ParameterValues:
    pairs = zip(values["sparse_names"], values["data_reader_sparse_param_array"], strict=True)
    # New objects, since those of the script are frozen.
    named = [type(slots)(name, slots.nnz_per_slot, slots.is_fixed_length, slots.slot_num) for name, slots in pairs]
    return {**_one_label(values), "data_reader_sparse_param_array": named}


@OLDER_FORMS.register()
def _has_reader_type(args: Args, kwargs: ParameterValues) -> bool:
    return "data_reader_type" in kwargs or bool(args and isinstance(args[0], DataReaderType_t))


@RULES.register()
def _sizes_match(values: ParameterValues) -> str | None:
    for name in ("slot_size_array", "nnz_array"):
        if len(values[name]) != values["num_slot"] and (values[name] or name == "slot_size_array"):
            return f"{name}: got {len(values[name])} numbers, expected one for each of the {values['num_slot']} slots"
    return None


# Embeddings


@RULES.register()
def _vectors_fit(values: ParameterValues) -> str | None:
    if values["embedding_vec_size"] > 1024:
        return f"embedding_vec_size: got {values['embedding_vec_size']}, expected at most 1024"
    return None


@RULES.register()
def _sizes_are_there(values: ParameterValues) -> str | None:
    kind = values["embedding_type"]
    needs = (Embedding_t.LocalizedSlotSparseEmbeddingOneHot, Embedding_t.HybridSparseEmbedding)
    if kind in needs and not values["slot_size_array"]:
        return f"slot_size_array: got none, expected the number of keys of every slot for {kind.name}"
    return None


@RULES.register()
def _has_room(values: ParameterValues) -> str | None:
    if not values["workspace_size_per_gpu_in_mb"] and not values["slot_size_array"]:
        return "got neither workspace_size_per_gpu_in_mb nor slot_size_array, expected one of them"
    return None


@OLDER_FORMS.register()
def _has_row_count(args: Args, kwargs: ParameterValues) -> bool:
    # The fourth position is the combiner: a number up to 3.0, a word since.
    return len(args) > 3 and isinstance(args[3], int)


@DERIVED.register()
def _combiner_name(values: ParameterValues) -> ParameterValues:
    return {"combiner": {0: "sum", 1: "mean"}.get(values["combiner"], values["combiner"])}


@OLDER_FORMS.register()
def _has_precomputed_indices(args: Args, kwargs: ParameterValues) -> bool:
    # 3.3 to 3.9 have two flags more in the middle, ten parameters where the others have eight.
    return len(args) > 8


@RULES.register()
def _sizes_are_good(values: ParameterValues) -> str | None:
    if values["max_vocabulary_size"] == 0:
        return "max_vocabulary_size: got 0, expected a number of rows, or -1 for a table that grows"
    if values["ev_size"] > 256:
        return f"ev_size: got {values['ev_size']}, expected at most 256"
    return None


@OLDER_FORMS.register()
def _has_number(args: Args, kwargs: ParameterValues) -> bool:
    # Up to 4.1 tables have numbers, from 4.2 on names.
    return "table_id" in kwargs or bool(args and not isinstance(args[0], str))


@OLDER_FORMS.register()
def _is_of_4_1(args: Args, kwargs: ParameterValues) -> bool:
    # The fourth position was the least key's until 4.1, which has the optimizer there.
    has_optimizer = len(args) > 3 and isinstance(args[3], CLASSES["OptParamsPy"])
    has_own = bool({"initializer_type", "up_bound", "max_sequence_len"} & set(kwargs))
    return _has_number(args, kwargs) and (has_optimizer or has_own)


@DERIVED.register()
def _name_from_number(values: ParameterValues) -> ParameterValues:
    return {"name": str(values["table_id"])}


@DERIVED.register()
def _name_from_id_space(values: ParameterValues) -> ParameterValues:
    return {"name": str(values["id_space"])}


@OLDER_FORMS.register()
def _is_of_23_02(args: Args, kwargs: ParameterValues) -> bool:
    # 23.02 begins with the layout of the output, other releases with a flag.
    return bool(args) and args[0] in ("feature_major", "batch_major")


@OLDER_FORMS.register()
def _has_plan_file(args: Args, kwargs: ParameterValues) -> bool:
    # 3.7 to 4.0 take a path, 4.1 takes three lists.
    return len(args) == 1 and isinstance(args[0], str)


# Layers


@DERIVED.register()
def _both_lengths(values: ParameterValues) -> ParameterValues:
    length = values["max_sequence_len"]
    return {"max_sequence_len_from": length, "max_sequence_len_to": length} if length else {}


@RULES.register()
def _two_layers_with_names(values: ParameterValues) -> str | None:
    tops, widths = values["top_name_list"], values["num_outputs"]
    if len(widths) < 2 or len(tops) != len(widths):
        return f"num_outputs: got {widths} for the tops {tops}, expected two layers or more, one for each top"
    return None


# Training caches and the model


@RULES.register()
def _a_model_for_each(values: ParameterValues) -> str | None:
    kinds, models, caches = (values[name] for name in ("ps_types", "sparse_models", "hmem_cache_configs"))
    if models and len(models) != len(kinds):
        return f"sparse_models: got {len(models)} paths, expected one for each of the {len(kinds)} ps_types"
    cached = sum(kind is TrainPSType_t.Cached for kind in kinds)
    if len(caches) not in (0, 1, cached, len(kinds)):
        return f"hmem_cache_configs: got {len(caches)}, expected one, or one for each of the {cached} Cached tables"
    return None


@OLDER_FORMS.register()
def _starts_with_kinds(args: Args, kwargs: ParameterValues) -> bool:
    return bool(args) and isinstance(args[0], list | tuple)


@RULES.register()
def _scratch_or_trained(values: ParameterValues) -> str | None:
    if not values["train_from_scratch"] and not values["trained_sparse_models"]:
        return "trained_sparse_models: got none with train_from_scratch=False, expected a path for each embedding"
    return None


@RULES.register()
def _optimizer_is_there(values: ParameterValues) -> str | None:
    optimizer = CLASSES["OptParamsPy"]
    if isinstance(values["reader_params"], optimizer) == isinstance(values["opt_params"], optimizer):
        return f"opt_params: got {values['opt_params']!r}, expected what CreateOptimizer makes, once"
    return None


# Inference


@RULES.register()
def _map_of_several_processes(values: ParameterValues) -> str | None:
    # Which rows go would be decided by each process for all others. HugeCTR's default is the largest uint64.
    if values["type"] is DatabaseType_t.multi_process_hash_map and values["overflow_margin"] < 2**63:
        return f"overflow_margin: got {values['overflow_margin']} with multi_process_hash_map, expected no bound"
    return None


@DERIVED.register()
def _batch_bound(values: ParameterValues) -> ParameterValues:
    # Up to 4.3, reads and writes have bounds of their own; one bound, the larger, serves both here.
    bounds = [values[name] for name in ("max_get_batch_size", "max_set_batch_size") if values.get(name) is not None]
    return {"max_batch_size": max(bounds)} if bounds else {}


@DERIVED.register()
def _volatile_bounds(values: ParameterValues) -> ParameterValues:
    # Processes that share a server need the same number: it decides which partition has a key.
    return {"num_partitions": values["num_partitions"] or min(16, available_threads()), **_batch_bound(values)}


@DERIVED.register()
def _older_databases(values: ParameterValues) -> ParameterValues:
    server, memory = values["distributed_db"], values["cpu_memory_db"]
    if server is not None or memory is not None:
        # Rows of a server need no second copy in memory; without one, None is the memory of 3.3's default.
        is_on = server is not None and server.type is not DatabaseType_t.disabled
        return {"volatile_db": server if is_on else memory}
    kind, path = values["db_type"], values["rocksdb_path"]
    if kind is Database_t.Local:
        return {}
    volatile, persistent = CLASSES["VolatileDatabaseParams"], CLASSES["PersistentDatabaseParams"]
    disk = persistent() if kind is Database_t.Redis else persistent(DatabaseType_t.rocks_db, path)
    if kind is Database_t.RocksDB:
        return {"volatile_db": volatile(DatabaseType_t.disabled), "persistent_db": disk}
    share = values["cache_size_percentage_redis"] if kind is Database_t.Hierarchy else 1.0
    redis = volatile(DatabaseType_t.redis_cluster, values["redis_ip"], initial_cache_rate=share)
    return {"volatile_db": redis, "persistent_db": disk}


@RULES.register()
def _one_file_for_each_table(values: ParameterValues) -> str | None:
    names, files = values["embedding_table_names"], values["sparse_model_files"]
    if any(names) and files and len(names) != len(files):
        return f"embedding_table_names: got {len(names)} names, expected one for each of the {len(files)} files"
    return None


@RULES.register()
def _tables_of_each_model(values: ParameterValues) -> str | None:
    for model in (params.model_name for params in values["inference_params_array"]):
        for name in ("emb_table_name", "embedding_vec_size"):
            if model not in values[name]:
                return f"{name}: got no {model!r}, expected every model of inference_params_array"
        tables, widths = len(values["emb_table_name"][model]), len(values["embedding_vec_size"][model])
        if tables != widths:
            return f"embedding_vec_size: got {widths} widths of {model!r}, expected one for each of its {tables} tables"
    return None
