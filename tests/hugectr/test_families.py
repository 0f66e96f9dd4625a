# SPDX-License-Identifier: Apache-2.0
"""Each family of HugeCTR's models finds what is planted, and nothing where labels follow from nothing."""

import json
import re

import pytest

import terarec.hugectr as hugectr
from terarec.hugectr.errors import WrongInputError
from tests.errors import at
from tests.hugectr import families
from tests.hugectr.planted import ROWS, Planted, histories, ratings, write_norm, write_raw_async
from tests.hugectr.scripts import auc_of
from tests.params import in_every_run


@pytest.fixture(scope="module")
def past(tmp_path_factory):
    directory, valid = tmp_path_factory.mktemp("past"), histories(5_000, seed=1)
    return write_norm(directory / "train", histories(15_000)), write_norm(directory / "valid", valid), valid.best_auc


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    directory, valid = tmp_path_factory.mktemp("raw"), Planted(5_000, seed=1)
    paths = (
        write_raw_async(directory / "train.bin", Planted(20_000)),
        write_raw_async(directory / "valid.bin", valid),
    )
    return families.raw_async_reader(*paths, 20_000, 5_000), valid.best_auc


def assert_learns(made, best_auc, iterations=75):
    made.fit(max_iter=iterations, display=0, eval_interval=0)
    assert auc_of(made) > 0.95 * best_auc


@pytest.mark.parametrize(
    "family",
    in_every_run(["dcn_v2", "wide_deep", "fused_dlrm"], ["dnn", "dcn_v2", "wide_deep", "deepfm", "fused_dlrm"]),
)
def test_click_models_over_norm_files(planted, family):
    assert_learns(getattr(families, family)(*planted[:2]), planted[2])


def assert_learns_nothing(made):
    made.fit(max_iter=40, display=0, eval_interval=0)
    assert abs(auc_of(made) - 0.5) < 0.03


@pytest.mark.parametrize("family", in_every_run(["deepfm"], ["dnn", "dcn_v2", "wide_deep", "deepfm", "fused_dlrm"]))
def test_click_models_learn_nothing_from_random_labels(random_labels, family):
    assert_learns_nothing(getattr(families, family)(*random_labels))


@pytest.mark.parametrize("family", in_every_run(["din"], ["din", "bst"]))
def test_models_of_histories_learn_nothing_from_random_labels(tmp_path, family):
    train = write_norm(tmp_path / "train", histories(15_000, is_random=True))
    valid = write_norm(tmp_path / "valid", histories(5_000, seed=1, is_random=True))
    assert_learns_nothing(getattr(families, family)(train, valid))


def test_models_over_static_tables_and_collections_learn_nothing_from_random_labels(tmp_path):
    train = write_raw_async(tmp_path / "train.bin", Planted(20_000, is_random=True))
    valid = write_raw_async(tmp_path / "valid.bin", Planted(5_000, seed=1, is_random=True))
    reader = families.raw_async_reader(train, valid, 20_000, 5_000)
    assert_learns_nothing(families.hybrid_dlrm(reader, lr=1.0))
    assert_learns_nothing(families.collection_dlrm(reader, lr=0.05))


@pytest.mark.slow
def test_ftrl_learns_nothing_from_random_labels(tmp_path):
    train = write_raw_async(tmp_path / "train.bin", Planted(20_000, is_random=True))
    valid = write_raw_async(tmp_path / "valid.bin", Planted(5_000, seed=1, is_random=True))
    ftrl = {"optimizer_type": hugectr.Optimizer_t.Ftrl, "beta": 0.0, "lambda1": 0.0001, "lambda2": 0.0001}
    reader = families.raw_async_reader(train, valid, 20_000, 5_000)
    assert_learns_nothing(families.collection_dlrm(reader, optimizer=ftrl, lr=0.2))


@pytest.mark.parametrize("family", in_every_run(["gmf"], ["gmf", "neumf"]))
def test_collaborative_filtering_learns_nothing_from_random_labels(tmp_path, family):
    train = write_norm(tmp_path / "train", ratings(20_000, is_random=True))
    valid = write_norm(tmp_path / "valid", ratings(5_000, seed=1, is_random=True))
    made = getattr(families, family)(train, valid)
    made.fit(num_epochs=1, display=0, eval_interval=0)
    assert abs(auc_of(made) - 0.5) < 0.03


@pytest.mark.slow
def test_generalised_matrix_factorisation_in_epochs(tmp_path):
    valid = ratings(5_000, seed=1)
    made = families.gmf(write_norm(tmp_path / "train", ratings(20_000)), write_norm(tmp_path / "valid", valid))
    made.fit(num_epochs=4, display=0, eval_interval=0)
    assert auc_of(made) > 0.95 * valid.best_auc


def test_tasks_learn_nothing_from_random_labels(tmp_path):
    train = write_norm(tmp_path / "train", Planted(20_000, labels=2, is_random=True))
    valid = write_norm(tmp_path / "valid", Planted(5_000, labels=2, seed=1, is_random=True))
    assert_learns_nothing(families.mmoe(train, valid))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["din", "bst"])
def test_models_of_histories(past, family):
    assert_learns(getattr(families, family)(*past[:2]), past[2], 150)


def test_dlrm_over_static_tables_and_raw_async_files(raw):
    assert_learns(families.hybrid_dlrm(raw[0], lr=1.0), raw[1], 120)


@pytest.mark.parametrize("rows", [ROWS, -1], ids=["static", "dynamic"])
def test_dlrm_over_a_collection(raw, rows):
    assert_learns(families.collection_dlrm(raw[0], rows=rows, lr=0.05), raw[1])


def test_a_collection_planned_by_release_3_7(raw, tmp_path):
    local = {"table_placement_strategy": "localized", "local_embedding_list": [0, 1, 2, 3]}
    (tmp_path / "plan.json").write_text(json.dumps([[local]]))
    made = families.planned_dlrm(raw[0], str(tmp_path / "plan.json"), lr=0.05)
    assert made.module.shapes["vector0"].dims == (8,)
    made.graph_to_json(str(tmp_path / "graph.json"))
    again = hugectr.Model(made.solver, made.reader_params, hugectr.CreateOptimizer())
    again.construct_from_json(str(tmp_path / "graph.json"), True)
    again.compile()
    assert again.module.spec == made.module.spec
    assert_learns(made, raw[1])


def test_ftrl_over_a_collection(raw):
    ftrl = {"optimizer_type": hugectr.Optimizer_t.Ftrl, "beta": 0.0, "lambda1": 0.0001, "lambda2": 0.0001}
    assert_learns(families.collection_dlrm(raw[0], optimizer=ftrl, lr=0.2), raw[1])


def test_a_joined_collection_of_several_optimizers_widths_and_combiners(raw):
    made = families.collection_flat(raw[0], lr=0.1)
    assert made.module.shapes["embedding"].dims == (20,)
    assert_learns(made, raw[1])


def test_collections_are_dumped_and_loaded(raw, tmp_path):
    made = families.collection_dlrm(raw[0], lr=0.05)
    made.fit(max_iter=5, display=0, eval_interval=0)
    with pytest.raises(WrongInputError, check=at("embedding_dump: table_names")):
        made.embedding_dump(str(tmp_path), ["t"])
    made.embedding_dump(str(tmp_path))
    other = families.collection_dlrm(raw[0], lr=0.05, seed=9)
    other.embedding_load(str(tmp_path), ["1"])
    ((own,), (twin,)) = (list(one.module.embeddings.values()) for one in (made, other))
    assert (own.table("1") == twin.table("1")).all()
    assert (own.table("0") != twin.table("0")).any()


def test_tasks_have_an_auc_each(tmp_path, capsys):
    valid = Planted(5_000, labels=2, seed=1)
    made = families.mmoe(
        write_norm(tmp_path / "train", Planted(20_000, labels=2)), write_norm(tmp_path / "valid", valid)
    )
    made.fit(max_iter=120, display=0, eval_interval=120)
    output = capsys.readouterr().out
    (both,) = re.findall(r"Evaluation, AUC: \{(0\.\d+), (0\.\d+)\}", output)
    assert min(map(float, both)) > 0.95 * valid.best_auc
    (mean,) = re.findall(r"Evaluation, AUC: (0\.\d+)\n", output)
    assert float(mean) == pytest.approx(sum(map(float, both)) / 2, abs=1e-5)


def test_neural_collaborative_filtering_in_epochs(tmp_path, capsys):
    valid = ratings(5_000, seed=1)
    sources = write_norm(tmp_path / "train", ratings(20_000)), write_norm(tmp_path / "valid", valid)
    families.neumf(*sources).fit(num_epochs=4, display=0, eval_interval=160)
    output = capsys.readouterr().out
    names = re.findall(r"Evaluation, (\w+): ([\d.]+)", output)
    assert [name for name, _ in names] == ["AUC", "AverageLoss", "HitRate"]
    assert float(names[0][1]) > 0.95 * valid.best_auc
    assert float(names[2][1]) > 0.8
