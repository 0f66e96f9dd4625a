# SPDX-License-Identifier: Apache-2.0
"""What `Model` writes it reads again: graphs, snapshots, collections."""

import pytest

import terarec.hugectr as hugectr
from terarec.hugectr.errors import IllegalCallError, WrongInputError
from tests.errors import at
from tests.hugectr.scripts import Layer, auc_of, dcn, dense_stack, layer, model, to_loss


def from_json(planted, path, *, include_dense_network=True):
    made = dcn_frame(planted)
    made.construct_from_json(str(path), include_dense_network)
    return made


def dcn_frame(planted):
    """Solver, reader and optimizer of `dcn`, without any part."""
    like = model(*planted[:2])
    return hugectr.Model(like.solver, like.reader_params, hugectr.CreateOptimizer())


def test_a_snapshot_continues_bit_for_bit_under_the_names_of_its_iteration(planted, tmp_path):
    made = dcn(*planted[:2], optimizer={"optimizer_type": hugectr.Optimizer_t.AdaGrad})
    made.fit(max_iter=8, display=0, eval_interval=0, snapshot=4, snapshot_prefix=str(tmp_path / "dcn"))
    names = {
        f"dcn{part}_{number}.model"
        for part in ("_dense", "_opt_dense", "0_sparse", "0_opt_sparse")
        for number in (4, 8)
    }
    assert {path.name for path in tmp_path.iterdir()} == names
    other = dcn(*planted[:2], seed=77, optimizer={"optimizer_type": hugectr.Optimizer_t.AdaGrad})
    other.load_dense_weights(str(tmp_path / "dcn_dense_8.model"))
    other.load_dense_optimizer_states(str(tmp_path / "dcn_opt_dense_8.model"))
    other.load_sparse_weights([str(tmp_path / "dcn0_sparse_8.model")])
    other.load_sparse_optimizer_states({"embedding": str(tmp_path / "dcn0_opt_sparse_8.model")})
    other.start_data_reading()
    assert auc_of(other) == auc_of(made)
    other.save_params_to_files(str(tmp_path / "again"))
    for part in ("_dense", "_opt_dense"):
        assert (tmp_path / f"again{part}_0.model").read_bytes() == (tmp_path / f"dcn{part}_8.model").read_bytes()


@pytest.mark.parametrize(("release", "numbers"), [("23.08", [3, 6]), ("23.09", [3, 6, 9])])
def test_snapshots_are_due_by_release(planted, tmp_path, release, numbers):
    made = dcn(*planted[:2], compat_release=release)
    made.fit(max_iter=9, display=0, eval_interval=0, snapshot=3, snapshot_prefix=str(tmp_path) + "/")
    assert sorted(int(path.stem.split("_")[-1]) for path in tmp_path.glob("_dense_*")) == numbers


def test_fine_tuning_takes_embeddings_under_a_new_network(planted, tmp_path):
    made = dcn(*planted[:2])
    made.graph_to_json(str(tmp_path / "dcn.json"))
    made.fit(max_iter=40, display=0, eval_interval=0, snapshot=40, snapshot_prefix=str(tmp_path / "dcn"))
    tuned = from_json(planted, tmp_path / "dcn.json", include_dense_network=False)
    layer(tuned, Layer.Reshape, "embedding", "flat", leading_dim=32)
    layer(tuned, Layer.Concat, "flat dense", "all")
    to_loss(tuned, dense_stack(tuned, "all", 16))
    tuned.load_sparse_weights([str(tmp_path / "dcn0_sparse_40.model")])
    tuned.freeze_embedding()
    tuned.fit(max_iter=40, display=0, eval_interval=0)
    assert auc_of(tuned) > 0.9 * planted[2]


def test_files_that_do_not_fit_are_rejected(planted, tmp_path):
    made = dcn(*planted[:2])
    with pytest.raises(WrongInputError, check=at("load_sparse_weights", "got 2 files")):
        made.load_sparse_weights(["a", "b"])
    with pytest.raises(WrongInputError, check=at("load_sparse_weights", "got 'wide'")):
        made.load_sparse_weights({"wide": "a"})
    with pytest.raises(FileNotFoundError):
        made.load_dense_weights(str(tmp_path / "none.model"))
    with pytest.raises(IllegalCallError, check=at("add")):
        made.construct_from_json(written(made, tmp_path / "dcn.json"), True)


def written(made, path):
    made.graph_to_json(str(path))
    return str(path)
