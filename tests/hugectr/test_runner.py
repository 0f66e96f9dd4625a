"""Scripts run with not a line changed, as `python SCRIPT` would run them."""

import json

import pytest

from terarec.hugectr.command_line import main
from tests.processes import run_python

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


def test_modules_take_the_place_of_installed_ones_and_solvers_have_the_requested_release(tmp_path):
    for name in ("hugectr", "other"):
        (tmp_path / f"{name}.py").write_text("print('wrong one')\n")
    (tmp_path / "train.py").write_text(
        "import hugectr\n"
        "helped = hugectr.solver_parser_helper(seed=1)\n"
        "print(hugectr.__name__, hugectr.CreateSolver(batchsize=64).compat_release, helped.batchsize)\n"
    )
    assert run("--compat-release", "3.1", "train.py", cwd=tmp_path).stdout == "terarec.hugectr 3.1 2048\n"
    assert run("--compat-release", "2.3", "train.py", cwd=tmp_path).stdout == "terarec.hugectr 2.3 16384\n"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--compat-release", "3.14", "train.py"], "--compat-release: got '3.14', expected one of 2.3, 3.0, 3.1"),
        (["none.py"], "none.py: does not exist, expected a script, --train or data_generator"),
        (["--trian", "x.json"], "got an unknown option '--trian'"),
        (["--train"], "--train: got 0 files, expected one training file"),
    ],
)
def test_wrong_commands_are_reported_in_one_line(tmp_path, monkeypatch, capsys, arguments, problem):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"terarec-hugectr: error: {problem}")
    assert told.count("\n") == 1


def test_help_and_version(capsys):
    assert main(["--help"]) == main(["--version"]) == 0
    told = capsys.readouterr().out
    assert "--train CONFIG.json" in told
    assert "HugeCTR 2.3 to 25.3.0" in told


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
