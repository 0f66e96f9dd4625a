# SPDX-License-Identifier: Apache-2.0
"""``terarec-hugectr --train`` and ``data_generator``, in this process, and scripts run without a changed line."""

import json
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest

import terarec.hugectr as hugectr
from terarec.data.records import NormSource, RecordReader
from terarec.hugectr.command_line import main, provide_modules
from terarec.spec import RecordLayout, SparseInput
from tests.hugectr.training_files import training_file
from tests.processes import run_python


def test_a_training_file_is_trained_to_its_end(planted, tmp_path, capsys):
    path = training_file(tmp_path / "conf.json", *planted[:2], solver={"max_iter": 161, "eval_interval": 80})
    assert main(["--train", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("InnerProduct" in line for line in lines)
    assert [line.split("Iter: ")[1].split()[0] for line in lines if "Iter: " in line] == [
        str(number) for number in range(20, 161, 20)
    ]
    found = [float(line.split("AUC: ")[1]) for line in lines if "Evaluation, AUC: " in line]
    assert len(found) == 2
    assert found[-1] > 0.95 * planted[2]
    assert "Finish 161 iterations" in lines[-1]


def test_the_target_ends_the_training(planted, tmp_path, capsys):
    changes = {"eval_metrics": ["AUC:0.5", "AverageLoss"], "eval_interval": 20, "max_iter": 1000}
    assert main(["--train", training_file(tmp_path / "conf.json", *planted[:2], solver=changes)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Hit target accuracy AUC 0.50000 at 20" in lines[-1]
    assert any("Evaluation, AverageLoss: " in line for line in lines)


def test_epochs_and_exported_predictions(planted, tmp_path, capsys):
    changes = {"eval_interval": 30, "max_eval_batches": 2, "export_predictions_prefix": str(tmp_path / "out")}
    path = training_file(tmp_path / "conf.json", *planted[:2], solver=changes)
    text = (tmp_path / "conf.json").read_text().replace('"max_iter": 80', '"num_epochs": 1')
    (tmp_path / "conf.json").write_text(text)
    assert main(["--train", path]) == 0
    assert "Finish 1 epochs" in capsys.readouterr().out
    assert len((tmp_path / "out_prediction_30").read_text().split()) == 1000
    assert set((tmp_path / "out_label_30").read_text().split()) == {"0", "1"}


def test_a_wrong_file_is_reported_in_one_line(planted, tmp_path, capsys):
    path = training_file(tmp_path / "conf.json", *planted[:2], solver={"batch": 3})
    assert main(["--train", path]) == 1
    error = capsys.readouterr().err
    place = f"{path}.solver: got an unknown key 'batch', did you mean 'batchsize'"
    assert error.startswith(f"terarec-hugectr: error: {place}")
    assert error.count("\n") == 1


def test_generated_data_is_what_the_file_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = training_file(tmp_path / "conf.json", "./file_list.txt", "./file_list_test.txt", solver={"max_iter": 3})
    arguments = [
        "data_generator",
        path,
        "./made",
        "80",
        "1",
        "--files",
        "4",
        "--samples",
        "600",
        "--long-tail",
        "short",
    ]
    assert main(arguments) == 0
    slots = SparseInput(name="data", nnz_per_slot=(1, 1, 1, 1), is_fixed_length=False)
    layout = RecordLayout(label_dim=1, dense_dim=3, inputs=(slots,), key_bytes=8)
    for name, samples in (("file_list.txt", 2400), ("file_list_test.txt", 600)):
        reader = RecordReader(
            NormSource(name, layout, checksum=True), batch_size=10_000, repeat=False, drop_last=False, threads=1
        )
        batch = next(iter(reader))
        reader.close()
        assert batch.batch_size == samples
        assert int(batch.sparse.keys.max()) < 80
    assert sorted(file.name for file in (tmp_path / "made" / "train").iterdir()) == [f"gen_{n}.data" for n in range(4)]
    assert main(["--train", path]) == 0
    assert "Finish 3 iterations" in capsys.readouterr().out


def test_release_3_0_1_names_the_size_of_each_slot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = training_file(tmp_path / "conf.json", "./file_list.txt", "./file_list_test.txt")
    sizes = ["--voc-size-array", "30,20,10,1", "--nnz-array", "1,1,1,1", "--files", "2", "--samples", "500"]
    law = ["--distribution", "powerlaw", "--alpha", "-1.2"]
    assert main(["data_generator", "--config-file", path, *sizes, *law]) == 0
    slots = SparseInput(name="data", nnz_per_slot=(1, 1, 1, 1), is_fixed_length=True)
    layout = RecordLayout(label_dim=1, dense_dim=3, inputs=(slots,), key_bytes=8)
    for name in ("file_list.txt", "file_list_test.txt"):
        reader = RecordReader(
            NormSource(name, layout, checksum=True), batch_size=10_000, repeat=False, drop_last=False, threads=1
        )
        keys = next(iter(reader)).sparse.keys.view(4, 1000)
        reader.close()
        assert keys.amin(1).tolist() == [0, 30, 50, 60]
        assert (keys.amax(1) < keys.new_tensor([30, 50, 60, 61])).all()
        assert (keys[0] < 3).sum() > (keys[0] >= 15).sum()  # few keys are frequent


def test_generated_data_has_the_labels_of_all_tasks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = training_file(tmp_path / "conf.json", "./file_list.txt", "./file_list_test.txt")
    training = json.loads(Path(path).read_text())
    training["layers"][0]["label"] = {"top": ["a", "b"], "label_dim": [1, 2]}
    Path(path).write_text(json.dumps(training))
    assert main(["data_generator", path, "./made", "80", "1", "--files", "1", "--samples", "5"]) == 0
    header = np.fromfile(tmp_path / "made" / "train" / "gen_0.data", "<i8", 6, offset=4)
    assert header.tolist() == [1, 5, 3, 3, 4, 0]  # records of 3 labels, 3 dense numbers and 4 slots


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "the following arguments are required: config"),
        (["conf.json"], "conf.json reads Norm, expected a directory"),
        (["conf.json", "made", "80", "1", "--long-tail", "endless"], "argument --long-tail"),
        (["none.json"], "none.json: does not exist"),
        (["--config-file", "conf.json", "--voc-size-array", "9,9"], "got 2 numbers, expected one for each of 4 slots"),
        (["--config-file", "conf.json", "--alpha", "1.2"], "--alpha: got 1.2, expected less than 0"),
        (["--config-file", "conf.json", "--alpha", "0"], "--alpha: got 0.0, expected less than 0"),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(tmp_path, monkeypatch, capsys, arguments, problem):
    monkeypatch.chdir(tmp_path)
    training_file(tmp_path / "conf.json", "./a.txt", "./b.txt")
    assert main(["data_generator", *arguments]) == 1
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1


def test_the_names_of_the_interface_are_the_commands():
    assert hugectr.SolverParser.__doc__
    assert main(["--help"]) == 0


SCRIPT = """
import sys
sys.path.append("/usr/local/hugectr/lib")
import hugectr
from mpi4py import MPI
from hugectr.tools import DataGeneratorParams
from hugectr.data import DataSourceParams
import hugectr.inference
import hugectr.optimizer as optimizer
import hugectr2onnx
from hugectr2onnx.hugectr_loader import ONNX_LAYER_TYPES
from hugectr.data import DataSource
import sibling

solver = hugectr.CreateSolver(batchsize=64, vvgpu=[[0]])
comm = MPI.COMM_WORLD
print(__name__, sys.argv, sys.path[0], sibling.NAME)
print(comm.Get_rank(), comm.Get_size(), comm.rank, comm.size, comm.bcast(3), comm.gather(4), comm.allreduce(5))
assert MPI.Is_thread_main()
print(solver.batchsize, solver.compat_release, hugectr.__version__, optimizer.CreateOptimizer().learning_rate)
if __name__ == "__main__":
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("variables", "is_replaced"), [("torchrun", True), ("mpirun", False)])
def test_processes_of_torchrun_get_a_world_of_their_own_also_where_mpi4py_is_installed(
    variables, is_replaced, monkeypatch
):
    names = {"torchrun": ("RANK", "WORLD_SIZE"), "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")}
    for name, value in zip(names[variables], ("1", "2"), strict=True):
        monkeypatch.setenv(name, value)
    installed = ModuleType("mpi4py")
    with mock.patch.dict(sys.modules, {"mpi4py": installed}):
        provide_modules()
        found = sys.modules["mpi4py"]
        assert (found is not installed) == is_replaced
        if is_replaced:
            assert (found.MPI.COMM_WORLD.rank, found.MPI.COMM_WORLD.size) == (1, 2)


def run(*arguments, cwd):
    return run_python("terarec.hugectr", *arguments, cwd=cwd, is_module=True)


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "sibling.py").write_text("NAME = 'beside'\n")
    (folder / "train.py").write_text(SCRIPT)
    return folder / "train.py"


def test_a_script_finds_its_modules_and_its_place(script, tmp_path):
    done = run("scripts/train.py", 7, "--batch", "3", cwd=tmp_path)
    assert done.stderr == ""
    assert done.returncode == 7
    lines = done.stdout.splitlines()
    assert lines[0] == f"__main__ ['scripts/train.py', '7', '--batch', '3'] {script.parent} beside"
    assert lines[1] == "0 1 0 1 3 [4] 5"
    assert lines[2] == "64 25.03 25.3.0 0.001"


def test_a_script_s_error_keeps_its_traceback(tmp_path):
    (tmp_path / "wrong.py").write_text("import hugectr\nhugectr.CreateSolver(batchsiz=3)\n")
    done = run("wrong.py", cwd=tmp_path)
    assert done.returncode == 1
    assert 'wrong.py", line 2' in done.stderr
    assert "did you mean 'batchsize'" in done.stderr.splitlines()[-1]


def test_modules_take_the_place_of_installed_ones_and_objects_have_what_is_requested(tmp_path):
    for name in ("hugectr", "other"):
        (tmp_path / f"{name}.py").write_text("print('wrong one')\n")
    (tmp_path / "train.py").write_text(
        "import hugectr\n"
        "helped = hugectr.solver_parser_helper(seed=1)\n"
        "print(hugectr.__name__, hugectr.CreateSolver(batchsize=64).compat_release, helped.batchsize)\n"
        "from hugectr.inference import InferenceParams\n"
        "print(InferenceParams('m', 8, 1.0, 'd', ['s'], 0, False, 0.5, True).executor)\n"
    )
    options = ("--compat-release", "3.1", "--executor", "onnxruntime")
    assert run(*options, "train.py", cwd=tmp_path).stdout == "terarec.hugectr 3.1 2048\nonnxruntime\n"
    assert run("--compat-release", "2.3", "train.py", cwd=tmp_path).stdout == "terarec.hugectr 2.3 16384\nauto\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--compat-release", "3.14", "train.py"], "--compat-release: got '3.14', expected one of 2.3, 3.0, 3.1"),
        (
            ["--compat-release", "3.1", "--executor", "tvm", "t.py"],
            "--executor: got 'tvm', expected one of auto, measure",
        ),
        (["none.py"], "none.py: does not exist, expected a script, --train or data_generator"),
        (["--trian", "x.json"], "got an unknown option '--trian'"),
        (["--train"], "--train: got 0 files, expected one training file"),
    ],
)
def test_wrong_commands_are_reported_in_one_line(tmp_path, monkeypatch, capsys, arguments, problem):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"terarec-hugectr: error: {problem}")
    assert output.count("\n") == 1


def test_help_and_version(capsys):
    assert main(["--help"]) == main(["--version"]) == 0
    output = capsys.readouterr().out
    assert "--train CONFIG.json" in output
    assert "HugeCTR 2.3 to 25.3.0" in output


LOGGED = """
import mlperf_logging.mllog.constants as constants
from mlperf_common.frameworks.hugectr import HCTRCommunicationHandler
from mlperf_common.logging import MLLoggerWrapper
logger = MLLoggerWrapper(HCTRCommunicationHandler(), value=None)
logger.start(key=constants.INIT_START)
logger.mlperf_submission_log(constants.DLRM_DCNv2, 2, "ORG")
logger.log_init_stop_run_start()
logger.event(key=constants.EVAL_ACCURACY, value=0.75, metadata={constants.EPOCH_NUM: 1.0})
logger.log_run_stop(status=constants.SUCCESS, epoch_num=1.0)
print(logger.comm_handler.global_rank(), logger.comm_handler.global_size())
"""


def test_a_script_for_mlperf_logs_its_events(tmp_path):
    (tmp_path / "logged.py").write_text(LOGGED)
    done = run("logged.py", cwd=tmp_path)
    assert done.stderr == ""
    *lines, last = done.stdout.splitlines()
    events = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    assert [(event["event_type"], event["key"], event["value"]) for event in events] == [
        ("INTERVAL_START", "init_start", None),
        ("POINT_IN_TIME", "submission_benchmark", "dlrm_dcnv2"),
        ("POINT_IN_TIME", "submission_org", "ORG"),
        ("POINT_IN_TIME", "submission_platform", "2xSUBMISSION_PLATFORM_PLACEHOLDER"),
        ("INTERVAL_END", "init_stop", None),
        ("INTERVAL_START", "run_start", None),
        ("POINT_IN_TIME", "eval_accuracy", 0.75),
        ("INTERVAL_END", "run_stop", None),
    ]
    assert events[6]["metadata"] == {"epoch_num": 1.0}
    assert events[7]["metadata"] == {"status": "success", "epoch_num": 1.0}
    assert last == "0 1"
