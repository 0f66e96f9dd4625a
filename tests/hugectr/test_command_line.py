"""``terarec-hugectr --train`` and ``data_generator``, in this process."""

import pytest

import terarec.hugectr as hugectr
from terarec.data.records import NormSource, RecordLayout, RecordReader, SparseInput
from terarec.hugectr.command_line import main
from tests.hugectr.training_files import training_file


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


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "the following arguments are required: config"),
        (["conf.json"], "conf.json reads Norm, expected a directory"),
        (["conf.json", "made", "80", "1", "--long-tail", "endless"], "argument --long-tail"),
        (["none.json"], "none.json: does not exist"),
        (["--config-file", "conf.json", "--voc-size-array", "9,9"], "got 2 numbers, expected one for each of 4 slots"),
        (["--config-file", "conf.json", "--alpha", "1.2"], "--alpha: got 1.2, expected less than 0"),
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
