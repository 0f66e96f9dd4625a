# SPDX-License-Identifier: Apache-2.0
"""`Model.fit`: what is due when, by release; the ends of a training; callbacks; epochs."""

import re
import signal

import pytest
import torch

import terarec.hugectr as hugectr
from terarec.hugectr.errors import LossCannotConvergeError, WrongInputError
from tests.dist.launch import run_ranks
from tests.errors import at
from tests.hugectr.planted import Planted, write_norm
from tests.hugectr.scripts import Layer, auc_of, dcn, layer, to_loss
from tests.hugectr.scripts import model as new_model


def iterations(output):
    return [int(number) for number in re.findall(r"Iter: (\d+) ", output)]


@pytest.mark.parametrize(
    ("release", "shown", "evaluations"),
    [("25.03", [4, 8, 12], 2), ("23.04", [4, 8, 12], 2), ("23.02", [4, 8], 1), ("3.1", [4, 8], 1)],
)
def test_a_release_shows_after_or_before_an_interval_is_full(planted, capsys, release, shown, evaluations):
    dcn(*planted[:2], compat_release=release).fit(max_iter=12, display=4, eval_interval=6)
    output = capsys.readouterr().out
    assert iterations(output) == shown
    assert output.count("Evaluation, AUC") == evaluations
    assert ("[HUGECTR]" in output) == (release == "3.1")


@pytest.mark.parametrize("release", ["25.03", "23.12", "3.1"])
def test_epochs_count_on_with_the_calls_that_find_the_end_of_the_data(planted, capsys, release):
    made = dcn(*planted[:2], repeat_dataset=False, compat_release=release)
    made.fit(num_epochs=2, display=30, eval_interval=50)
    output = capsys.readouterr().out
    assert "Finish 2 epochs 82 global iterations with batchsize 500 in" in output
    assert output.count("--Epoch ") == 2
    assert iterations(output) == [30, 60]
    assert "Evaluation, AUC: 0." in output
    assert not made.train()


def test_epochs_learn_the_planted_model(planted):
    *sources, best_auc = planted
    made = dcn(*sources, repeat_dataset=False)
    made.fit(num_epochs=3, display=0, eval_interval=0)
    assert auc_of(made) > 0.95 * best_auc


def test_a_script_walks_over_its_epochs_itself(planted):
    made = dcn(*planted[:2], repeat_dataset=False)
    made.get_data_reader_train().set_source(planted[0])
    count = 0
    while made.train():
        count += 1
    assert count == 40
    assert made.get_data_reader_train().is_eof()
    made.get_data_reader_train().set_source()
    assert made.train()


def test_a_short_last_batch_is_left_out_unless_requested(planted):
    counts = []
    for drops, release in ((True, "25.03"), (False, "25.03"), (True, "4.2")):
        settings = {"batchsize": 600, "batchsize_eval": 600, "drop_incomplete_batch": drops, "compat_release": release}
        made = dcn(*planted[:2], repeat_dataset=False, **settings)
        made.get_data_reader_train().set_source(planted[0])
        made.get_data_reader_eval().set_source(planted[1])
        counts.append([sum(iter(call, False)) for call in (made.train, made.eval)])
    assert counts == [[33, 9], [34, 9], [33, 8]]


def test_a_last_batch_of_one_row_and_the_states_of_rmsprop_end_no_training(tmp_path):
    """Both ended one without any file: batch norm at the end of the data, the states at the first snapshot."""
    source = write_norm(tmp_path / "data", Planted(21))
    optimizer = {"optimizer_type": hugectr.Optimizer_t.RMSProp}
    settings = {"repeat_dataset": False, "drop_incomplete_batch": False, "batchsize": 10}
    made, other = (new_model(source, source, optimizer=optimizer, slots=4, **settings) for _ in range(2))
    for each in (made, other):
        layer(each, Layer.BatchNorm, "dense", "normal")
        to_loss(each, "normal")
    made.fit(num_epochs=2, display=0, eval_interval=0, snapshot=5, snapshot_prefix=str(tmp_path / "m"))
    made.save_params_to_files(str(tmp_path / "m"), 6)
    assert (tmp_path / "m_opt_dense_6.model").stat().st_size == (tmp_path / "m_dense_6.model").stat().st_size
    other.load_dense_weights(str(tmp_path / "m_dense_6.model"))
    other.load_dense_optimizer_states(str(tmp_path / "m_opt_dense_6.model"))
    assert torch.equal(other.module.layers[1].linear.weight, made.module.layers[1].linear.weight)


def test_training_ends_when_auc_is_above_the_target(planted, capsys):
    made = dcn(*planted[:2], metrics_spec={hugectr.MetricsType.AUC: 0.6})
    made.fit(max_iter=100, display=0, eval_interval=20)
    output = capsys.readouterr().out
    assert re.search(r"Hit target accuracy AUC 0.60000 at (19|39) / 100 iterations with batchsize 500", output)
    assert "Finish" not in output


def test_a_target_that_is_met_but_not_passed_does_not_end_it(planted, capsys):
    made = dcn(*planted[:2], metrics_spec={hugectr.MetricsType.AUC: 1.0})
    made.get_eval_metrics = lambda: [("AUC", 1.0)]
    made.fit(max_iter=4, display=0, eval_interval=2)
    assert "Finish 4 iterations" in capsys.readouterr().out


def test_a_nan_loss_is_an_error_when_it_is_displayed(planted):
    with pytest.raises(LossCannotConvergeError, check=at("fit")):
        diverging(planted).fit(max_iter=4, display=2)
    diverging(planted, gen_loss_summary=False).fit(max_iter=4, display=2, eval_interval=0)


def diverging(planted, **settings):
    made = new_model(*planted[:2], optimizer={"optimizer_type": hugectr.Optimizer_t.SGD}, lr=1e30, **settings)
    for bottom, top in (("dense", "a"), ("a", "b"), ("b", "c")):
        made.add(
            hugectr.DenseLayer(
                layer_type=hugectr.Layer_t.InnerProduct, bottom_names=[bottom], top_names=[top], num_output=4
            )
        )
    return to_loss(made, "c")


class Watcher(hugectr.TrainingCallback):
    def __init__(self, stop_at=None):
        super().__init__()
        self.calls, self.stop_at = [], stop_at

    def on_training_start(self):
        self.calls.append("start")

    def on_training_end(self, current_iter):
        self.calls.append(("end", current_iter))

    def on_eval_start(self, current_iter):
        self.calls.append(("eval", current_iter))
        return True  # HugeCTR's loop does not look at it

    def on_eval_end(self, current_iter, eval_results):
        self.calls.append(sorted(eval_results))
        return current_iter == self.stop_at


def test_callbacks_are_called_and_may_end_the_training(planted):
    patient, hasty = Watcher(), Watcher(stop_at=3)
    dcn(*planted[:2], training_callbacks=[patient]).fit(max_iter=5, display=0, eval_interval=2)
    assert patient.calls == ["start", ("eval", 1), ["AUC"], ("eval", 3), ["AUC"], ("end", 4)]
    dcn(*planted[:2], training_callbacks=[hasty]).fit(max_iter=5, display=0, eval_interval=2)
    assert hasty.calls[-2:] == [["AUC"], ("end", 3)]


class StopsAlone(hugectr.TrainingCallback):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def on_eval_end(self, current_iter, eval_results):
        return self.rank == 1


def stopped_by_one(rank, planted):
    made = dcn(*planted[:2], training_callbacks=[StopsAlone(rank)])
    made.fit(max_iter=5, display=0, eval_interval=2)
    return made._compiled_model.trainer.step


def test_a_callback_on_one_process_ends_the_training_on_all(planted):
    assert run_ranks(2, stopped_by_one, planted, joins=False) == [2, 2]


class Interrupting(hugectr.TrainingCallback):
    def on_eval_start(self, current_iter):
        signal.raise_signal(signal.SIGINT)
        return False


def test_ctrl_c_ends_after_a_whole_iteration_as_python_scripts_expect(planted):
    made = dcn(*planted[:2], training_callbacks=[Interrupting()])
    with pytest.raises(KeyboardInterrupt):
        made.fit(max_iter=50, display=0, eval_interval=4)
    assert made.last_iteration == 3
    whole = dcn(*planted[:2])
    whole.fit(max_iter=4, display=0, eval_interval=0)
    assert made.get_current_loss() == whole.get_current_loss()


def test_a_second_fit_resumes(planted):
    whole = dcn(*planted[:2])
    whole.fit(max_iter=6, display=0, eval_interval=0)
    halves = dcn(*planted[:2])
    for _ in range(2):
        halves.fit(max_iter=3, display=0, eval_interval=0)
    assert whole.get_current_loss() == halves.get_current_loss()


def test_arguments_that_are_not_there_or_no_numbers_are_reported_in_one_line(planted):
    made = dcn(*planted[:2])
    with pytest.raises(WrongInputError, check=at("Model.fit")):
        made.fit(maxiter=3)
    with pytest.raises(WrongInputError, check=at("Model.fit: snapshot_prefix")):
        made.fit(snapshot_prefix=3)
    with pytest.raises(WrongInputError, check=at("Model.set_learning_rate: lr")):
        made.set_learning_rate("x")
    with pytest.raises(WrongInputError, check=at("LearningRateScheduler")):
        made.reset_learning_rate_scheduler(0.1, warmup=3)


def test_an_evaluation_of_data_that_repeats_resumes_where_the_last_stopped(planted):
    made = dcn(*planted[:2], max_eval_batches=4)  # of the 10 that there are

    def seen():
        for _ in range(4):
            made.eval()
        made.get_eval_metrics()
        return made.check_out_tensor("dense", hugectr.Tensor_t.Evaluate)

    made.start_data_reading()
    first, second, third = seen(), seen(), seen()
    assert (first != second).any()
    whole = dcn(*planted[:2])
    whole.start_data_reading()
    batches = []
    for _ in range(10):
        whole.eval()
        batches.append(whole.check_out_tensor("dense", hugectr.Tensor_t.Evaluate))
    for found, number in ((first, 3), (second, 7), (third, 1)):
        assert (found == batches[number]).all()
