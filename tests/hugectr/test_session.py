# SPDX-License-Identifier: Apache-2.0
"""The low-level interface: a training file, and the loop of a script."""

import numpy as np
import pytest

import terarec.hugectr as hugectr
from terarec.formats.hugectr.split_writer import write_keyset
from terarec.hugectr import Session, get_learning_rate_scheduler, solver_parser_helper
from terarec.hugectr.errors import FileCannotOpenError, IllegalCallError, WrongInputError
from terarec.hugectr.graph_json import read_parts
from terarec.hugectr.json_files import read_json
from tests.errors import at
from tests.hugectr.planted import ROWS
from tests.hugectr.training_files import SCHEDULE, training_file


def config(**changes):
    settings = {"seed": 5, "batchsize": 500, "batchsize_eval": 500, "vvgpu": [[0]], "i64_input_key": True, **changes}
    return solver_parser_helper(**settings)


@pytest.fixture
def training(planted, tmp_path):
    source, eval_source, _ = planted
    return training_file(tmp_path / "conf.json", source, eval_source)


def test_the_loop_of_a_script_finds_the_planted_signal(planted, training):
    solver_config = config(max_eval_batches=10, repeat_dataset=True)
    lr_sch = get_learning_rate_scheduler(training)
    sess = Session(solver_config, training)
    sess.start_data_reading()
    losses = []
    for i in range(160):
        sess.set_learning_rate(lr_sch.get_next())
        assert sess.train()
        if i % 10 == 0:
            losses.append(sess.get_current_loss())
    sess.check_overflow()
    sess.copy_weights_for_evaluation()
    ((name, auc),) = sess.evaluation()
    assert name == "AUC"
    assert auc > 0.95 * planted[2]
    assert losses[-1] < 0.7 * losses[0]
    for _ in range(solver_config.max_eval_batches):
        sess.eval()
    assert sess.get_eval_metrics() == [("AUC", auc)]
    assert sess.get_params_num() == (4 * 8 + 3) * 16 + 16 + 16 + 1 + 4 * ROWS * 8


def losses_of(model, lr):
    model.start_data_reading()
    found = []
    for _ in range(12):
        model.set_learning_rate(lr)
        model.train()
        found.append(model.get_current_loss())
    return found


def test_twins_by_file_and_by_calls_have_the_same_losses(planted, training):
    session = Session(config(), training)
    solver = hugectr.CreateSolver(seed=5, batchsize=500, batchsize_eval=500, vvgpu=[[0]], i64_input_key=True)
    reader = hugectr.DataReaderParams(hugectr.DataReaderType_t.Norm, planted[0], [], planted[1], hugectr.Check_t.Sum)
    model = hugectr.Model(solver, reader, hugectr.CreateOptimizer())
    for part in read_parts(read_json(training).children("layers")):
        model.add(part)
    model.compile()
    assert losses_of(session, 0.01) == losses_of(model, 0.01)


def test_a_session_resumes_from_the_files_of_another(planted, tmp_path):
    momentum = {"type": "MomentumSGD", "momentum_sgd_hparam": {"learning_rate": 0.01, "momentum_factor": 0.9}}
    conf = training_file(tmp_path / "conf.json", *planted[:2], optimizer=momentum)
    whole = Session(config(), conf)
    losses = losses_of(whole, 0.01)
    half = Session(config(), conf)
    half.start_data_reading()
    half.set_learning_rate(0.01)
    for _ in range(6):
        half.train()
    half.download_params_to_files(str(tmp_path / "half"), 6)
    rest = Session(
        config(
            seed=99,
            model_file=str(tmp_path / "half_dense_6.model"),
            dense_opt_states_file=str(tmp_path / "half_opt_dense_6.model"),
            embedding_files=[str(tmp_path / "half0_sparse_6.model")],
            sparse_opt_states_file=[str(tmp_path / "half0_opt_sparse_6.model")],
        ),
        conf,
    )
    rest.set_learning_rate(0.01)
    reader = rest.get_data_reader_train()
    reader.set_source()
    for _ in range(6):
        reader.next_batch()  # which the first half took
    found = [rest.get_current_loss() for _ in range(6) if rest.train()]
    assert found == losses[6:]


def test_epochs_of_files_one_after_another(planted, training):
    source, eval_source, _ = planted
    sess = Session(config(repeat_dataset=False, max_eval_batches=100), training)
    with pytest.raises(IllegalCallError, check=at("train")):
        sess.train()
    reader = sess.get_data_reader_train()
    sess.get_data_reader_eval().set_source(eval_source)
    for set_source in (reader.set_source, reader.set_file_list_source):
        set_source(source)
        done = 0
        while sess.train():
            done += 1
        assert done == 40
        assert reader.is_eof()
    assert sess.evaluation()[0][1] > 0.5


def test_passes_with_a_keyset_each_equal_training_without(planted, tmp_path):
    source, _, _ = planted
    # A global update moves all rows in every step, which then stay in memory.
    optimizer = {"type": "Adam", "update_type": "LazyGlobal", "adam_hparam": SCHEDULE}
    training = training_file(tmp_path / "conf.json", *planted[:2], optimizer=optimizer)
    write_keyset(tmp_path / "0.keyset", np.arange(4 * ROWS), 8)
    write_keyset(tmp_path / "few.keyset", np.arange(3), 8)
    losses = []
    for is_passes in (False, True):
        sess = Session(config(repeat_dataset=False), training, is_passes, str(tmp_path / "temp"))
        sess.get_data_reader_train().set_source(source)
        if is_passes:
            sess.get_model_oversubscriber().update(str(tmp_path / "0.keyset"))
        assert all(sess.train() for _ in range(5))
        losses.append(sess.get_current_loss())
    assert losses[0] == losses[1]
    assert [path.name.split("-")[0] for path in (tmp_path / "temp").iterdir()] == ["cache"]
    sess.download_params_to_files(str(tmp_path / "made"), 5)
    assert (tmp_path / "made0_sparse_5.model").stat().st_size == (8 + 4 * 8) * 4 * ROWS  # of 3.0: keys and vectors
    resumed = config(
        repeat_dataset=False,
        model_file=str(tmp_path / "made_dense_5.model"),
        embedding_files=[str(tmp_path / "made0_sparse_5.model")],
    )
    again = Session(resumed, training)
    for sessions in (sess, again):
        sessions.get_data_reader_eval().set_source()
    assert again.evaluation() == sess.evaluation()
    sess.get_model_oversubscriber().update(str(tmp_path / "few.keyset"))
    with pytest.raises(WrongInputError, check=at("embedding 'vectors'")):
        sess.train()


def test_an_evaluation_exports_its_predictions(training, tmp_path):
    sess = Session(config(max_eval_batches=2), training)
    sess.start_data_reading()
    sess.evaluation(str(tmp_path / "predictions"), str(tmp_path / "labels"))
    predictions = [float(text) for text in (tmp_path / "predictions").read_text().split()]
    labels = [float(text) for text in (tmp_path / "labels").read_text().split()]
    assert len(predictions) == len(labels) == 1000
    assert all(0 < prediction < 1 for prediction in predictions)
    assert set(labels) == {0.0, 1.0}
    sess.evaluation(str(tmp_path / "predictions"), str(tmp_path / "labels"))
    assert len((tmp_path / "labels").read_text().split()) == 1000  # 3.0 replaces them
    with pytest.raises(WrongInputError, check=at("evaluation")):
        sess.evaluation(str(tmp_path / "predictions"))


@pytest.mark.parametrize("batches", [4, 10, 11])
def test_evaluations_in_epochs_are_of_the_same_samples(training, batches):
    """The data has 10 batches: what an evaluation left of them, or nothing, was the next one's."""
    sess = Session(config(max_eval_batches=batches, repeat_dataset=False), training)
    first = sess.evaluation()
    assert first[0][1] > 0
    assert [sess.evaluation() for _ in range(3)] == [first] * 3


def test_the_spelling_of_2_3(training):
    sess = Session(config(eval_batches=3, model_file="", embedding_files=[]), training)
    assert (sess.model.solver.max_eval_batches, sess.model.solver.repeat_dataset) == (3, False)


def test_sessions_that_cannot_be(training, tmp_path):
    with pytest.raises(FileCannotOpenError, check=at(f"{tmp_path}/none.json")):
        Session(config(), str(tmp_path / "none.json"))
    with pytest.raises(WrongInputError, check=at("Session: solver_config")):
        Session(hugectr.CreateSolver(), training)


PREVIEW = {
    "data_reader_type": hugectr.DataReaderType_t.Norm,
    "check_type": hugectr.Check_t.Sum,
    "label_dim": 1,
    "label_name": "label",
    "dense_dim": 3,
    "dense_name": "dense",
    "data_reader_sparse_param_array": [hugectr.DataReaderSparseParam(hugectr.DataReaderSparse_t.Distributed, 4, 1, 4)],
    "sparse_names": ["data"],
}


def test_the_preview_of_3_0(planted, training, capsys):
    solver = solver_parser_helper(
        seed=5,
        num_epochs=0,
        max_iter=161,
        max_eval_batches=10,
        batchsize_eval=500,
        batchsize=500,
        display=50,
        eval_interval=80,
        i64_input_key=True,
        repeat_dataset=True,
    )
    optimizer = hugectr.optimizer.CreateOptimizer(
        optimizer_type=hugectr.Optimizer_t.Adam, learning_rate=0.01, use_mixed_precision=False
    )
    model = hugectr.Model(solver, optimizer)
    model.add(hugectr.Input(source=planted[0], eval_source=planted[1], **PREVIEW))
    for part in read_parts(read_json(training).children("layers"))[1:]:
        model.add(part)
    model.compile()
    model.summary()
    model.fit()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("Iter: ")[1].split()[0] for line in lines if "Iter: " in line] == ["50", "100", "150"]
    found = [float(line.split("AUC: ")[1]) for line in lines if "Evaluation, AUC: " in line]
    assert len(found) == 2
    assert found[-1] > 0.95 * planted[2]


def test_the_preview_of_3_0_trains_pass_by_pass(planted, training, tmp_path):
    write_keyset(tmp_path / "0.keyset", np.arange(4 * ROWS), 8)
    found = []
    for is_passes in (False, True):
        settings = {"use_model_oversubscriber": True, "temp_embedding_dir": str(tmp_path / "temp")} if is_passes else {}
        optimizer = hugectr.optimizer.CreateOptimizer(
            optimizer_type=hugectr.Optimizer_t.AdaGrad, learning_rate=0.01, use_mixed_precision=False
        )
        model = hugectr.Model(config(repeat_dataset=False, **settings), optimizer)
        model.add(hugectr.Input(source=planted[0], eval_source=planted[1], **PREVIEW))
        for part in read_parts(read_json(training).children("layers"))[1:]:
            model.add(part)
        model.compile()
        model.get_data_reader_train().set_source(planted[0])
        if is_passes:
            model.get_model_oversubscriber().update(str(tmp_path / "0.keyset"))
            assert list((tmp_path / "temp").glob("cache-*/*.rows"))
        found.append([model.get_current_loss() for _ in range(3) if model.train()])
    assert found[0] == found[1]
