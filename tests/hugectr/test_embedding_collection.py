# SPDX-License-Identifier: Apache-2.0
"""Lookups of a collection, and plans that are checked."""

import json

import pytest

import terarec.hugectr as hugectr
from terarec.hugectr.errors import BrokenFileError, FileCannotOpenError, IllegalCallError, WrongInputError
from terarec.hugectr.network import Network
from tests.errors import at


def tables(count):
    return [
        hugectr.EmbeddingTableConfig(name=str(number), max_vocabulary_size=10, ev_size=4) for number in range(count)
    ]


def collection(count=2):
    config = hugectr.EmbeddingCollectionConfig()
    for number, table in enumerate(tables(count)):
        config.embedding_lookup(table_config=table, bottom_name=f"d{number}", top_name=f"e{number}", combiner="sum")
    return config


def test_lookups_one_by_one():
    config = collection()
    config.embedding_lookup(config.lookups[0].table, "d2", "e2", "mean")
    assert [(look.table.name, look.bottom_name, look.top_name, look.combiner) for look in config.lookups] == [
        ("0", "d0", "e0", "sum"),
        ("1", "d1", "e1", "sum"),
        ("0", "d2", "e2", "average"),
    ]
    assert config.table_names() == ["0", "1"]
    assert config.concatenated_name == ""


def test_an_input_of_several_slots_is_rejected():
    """Its other slots would have no effect; upstream rejects it, too."""
    network = Network(hugectr.CreateSolver(use_embedding_collection=True), hugectr.CreateOptimizer())
    sparse = [hugectr.DataReaderSparseParam("d0", 1, True, 1), hugectr.DataReaderSparseParam("d1", 1, True, 4)]
    network.add(hugectr.Input(1, "label", 0, "dense", sparse))
    network.add(collection())
    with pytest.raises(WrongInputError, check=at("EmbeddingCollectionConfig: bottom_name 'd1'")):
        network.plan({})


def test_lookups_as_lists():
    config = hugectr.EmbeddingCollectionConfig(use_exclusive_keys=True)
    config.embedding_lookup(tables(2), ["a", "b"], "joined", ["sum", "concat"])
    assert [(look.top_name, look.combiner) for look in config.lookups] == [("joined0", "sum"), ("joined1", "concat")]
    assert config.concatenated_name == "joined"
    with pytest.raises(IllegalCallError, check=at("embedding_lookup")):
        config.embedding_lookup(tables(1)[0], "a", "more", "sum")


def test_lookups_that_cannot_be():
    config = collection()
    with pytest.raises(IllegalCallError, check=at("embedding_lookup")):
        config.embedding_lookup(tables(1), ["a"], "joined", ["sum"])
    with pytest.raises(WrongInputError, check=at("EmbeddingCollectionConfig.embedding_lookup: top_name")):
        config.embedding_lookup(config.lookups[0].table, "a", "e0", "sum")
    with pytest.raises(WrongInputError, check=at("EmbeddingCollectionConfig.embedding_lookup: combiner")):
        config.embedding_lookup(config.lookups[0].table, "a", "e5", ["sum"])
    with pytest.raises(WrongInputError, check=at("EmbeddingCollectionConfig.embedding_lookup: table_config")):
        config.embedding_lookup(hugectr.EmbeddingTableConfig("0", 11, 4), "a", "e5", "sum")
    with pytest.raises(WrongInputError, check=at("EmbeddingCollectionConfig.embedding_lookup")):
        hugectr.EmbeddingCollectionConfig().embedding_lookup(tables(2), ["a"], "joined", ["sum", "sum"])
    assert len(config.lookups) == 2


def test_a_plan_is_kept():
    config = collection(3)
    config.shard(
        [["0", "2"], ["1", "2"]], [("mp", ["0", ("1", 2)]), ("dp", ["2"])], {hugectr.CompressionStrategy.Unique: ["0"]}
    )
    assert config.plan.matrix == (("0", "2"), ("1", "2"))
    assert config.plan.strategy == (("mp", ("0", ("1", 2))), ("dp", ("2",)))


@pytest.mark.parametrize(
    ("matrix", "strategy", "place"),
    [
        ([["0"], ["1"]], [("mp", ["0"])], ("shard: shard_strategy", "'1' is in 0 groups")),
        ([["0"], ["1"]], [("mp", ["0", "1"]), ("dp", ["1"])], ("shard: shard_strategy", "'1' is in 2 groups")),
        ([["0"], []], [("mp", ["0", "1"])], ("shard: shard_matrix", "'1' is on no GPU")),
        ([["0"], ["1"]], [("mp", ["0"]), ("dp", ["1"])], ("shard: shard_matrix", "GPU 0 lacks the dp table '1'")),
        ([["0"], ["1", "9"]], [("mp", ["0", "1"])], ("shard",)),
        ([["0"], ["1"]], [("xp", ["0", "1"])], ("EmbeddingCollectionConfig.shard: shard_strategy",)),
    ],
)
def test_plans_that_cannot_be(matrix, strategy, place):
    config = collection()
    with pytest.raises(WrongInputError, check=at(*place)):
        config.shard(shard_matrix=matrix, shard_strategy=strategy)
    assert config.plan is None


def test_localized_is_an_older_word_for_parts():
    config = collection()
    config.shard([["0"], ["1"]], [("localized", ["0", "1"])])
    assert config.plan.strategy == (("mp", ("0", "1")),)


def test_tables_in_the_words_of_every_release():
    adam = hugectr.CreateOptimizer()
    tables = [
        hugectr.EmbeddingTableConfig("7", 10, 4, adam),
        hugectr.EmbeddingTableConfig("7", 10, 4, opt_params_or_empty=adam, init_param_or_empty=None),
        hugectr.EmbeddingTableConfig(
            name="7", max_vocabulary_size=10, ev_size=4, min_key=0, max_key=9, opt_params=adam
        ),
        hugectr.EmbeddingTableConfig(7, 10, 4, adam),
        hugectr.EmbeddingTableConfig(table_id=7, max_vocabulary_size=10, ev_size=4, opt_params_py=adam, up_bound=-1),
        hugectr.EmbeddingTableConfig(7, 10, 4, 0, 9, adam),
        hugectr.EmbeddingTablePlaceHolder(id_space=7, max_vocabulary_size=10, ev_size=4, opt_params_py=adam),
    ]
    for table in tables:
        found = (table.name, table.max_vocabulary_size, table.ev_size, table.opt_params, table.init_param)
        assert found == ("7", 10, 4, adam, None)
    with pytest.raises(WrongInputError, check=at("EmbeddingTableConfig")):
        hugectr.EmbeddingTableConfig("7", 10, 4, opt_params=adam, opt_params_or_empty=adam)
    with pytest.raises(WrongInputError, check=at("EmbeddingTableConfig: up_bound")):
        hugectr.EmbeddingTableConfig(table_id=7, max_vocabulary_size=10, ev_size=4, up_bound=0.5)


def test_release_23_02_joins_all_lookups_by_a_layout():
    config = hugectr.EmbeddingCollectionConfig(output_layout="batch_major", indices_only=True)
    for number in range(3):
        table = hugectr.EmbeddingTableConfig(str(number), 10, 4)
        config.embedding_lookup(table, f"d{number}", f"e{number}", "sum")
    assert config.concatenated_name == "e0,e1,e2"
    assert hugectr.EmbeddingCollectionConfig("feature_major").concatenated_name == ""


def planner(count=2):
    made = hugectr.EmbeddingPlanner()
    for number in range(count):
        table = hugectr.EmbeddingTableConfig(table_id=number, max_vocabulary_size=10, ev_size=4, min_key=0, max_key=10)
        made.embedding_lookup(table, f"d{number}", f"e{number}", "sum")
    return made


def test_plans_of_a_planner(tmp_path):
    placed = planner().create_embedding_collection(
        shard_matrix=[[1, 1], [0, 1]], emb_table_group_strategy=[[0], [1]], emb_table_placement_strategy=["mp", "dp"]
    )
    assert isinstance(placed, hugectr.EmbeddingCollectionPlaceholder)
    group = {"global_embedding_list": [[0, 1], [1]], "shards_count": 1, "shard_id": 0}
    plan = [
        [
            {**group, "table_placement_strategy": "mp", "local_embedding_list": [0]},
            {**group, "table_placement_strategy": "dp", "local_embedding_list": [1]},
        ],
        [{**group, "table_placement_strategy": "dp", "local_embedding_list": [1]}],
    ]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    assert planner().create_embedding_collection(str(path)).plan == placed.plan
    plan[0][0]["table_placement_strategy"] = "localized"
    path.write_text(json.dumps(plan))
    assert planner().create_embedding_collection(str(path)).plan == placed.plan
    path.write_text("[[{}]]")
    with pytest.raises(BrokenFileError, check=at(path, "not a plan")):
        planner().create_embedding_collection(str(path))
    path.write_text(json.dumps([[{**group, "table_placement_strategy": "mp", "local_embedding_list": [7]}]]))
    with pytest.raises(BrokenFileError, check=at(path, "beyond the 2")):
        planner().create_embedding_collection(str(path))
    with pytest.raises(FileCannotOpenError, check=at("EmbeddingPlanner.create_embedding_collection: plan_file")):
        planner().create_embedding_collection(str(tmp_path / "none.json"))
    with pytest.raises(WrongInputError, check=at("EmbeddingPlanner.create_embedding_collection: shard_matrix")):
        planner().create_embedding_collection(
            shard_matrix=[[1]], emb_table_group_strategy=[[0]], emb_table_placement_strategy=["mp"]
        )
