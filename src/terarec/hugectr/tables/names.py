"""What a script may name besides the callables with tables: methods, classes, modules and commands."""

from __future__ import annotations

from dataclasses import dataclass

from terarec.hugectr.tables.table import NEWEST, OLDEST, Status


@dataclass(frozen=True, slots=True)
class Name:
    """A name of HugeCTR.

    Attributes:
        name: as scripts spell it; methods with their class.
        meaning: one line, for the page.
        since: first release that has it.
        until: last release that has it.
        status: SUPPORTED, IGNORED or REFUSED.
        why: why it is ignored or refused.
    """

    name: str
    meaning: str
    since: str = OLDEST
    until: str = NEWEST
    status: Status = Status.SUPPORTED
    why: str = ""


_SERVING = "serving through HugeCTR's interface comes later; `terarec serve` and `terarec predict` serve trained models"

MODEL = (
    Name("Model", "a model, its data and its training; `Model(solver, optimizer)` is the preview of 3.0", "3.0"),
    Name("Model.add", "add an Input, an embedding, a layer, a group of layers or a collection", "3.0"),
    Name("Model.compile", "build it; with names of labels and weights of their losses", "3.0"),
    Name("Model.summary", "print its inputs, layers and shapes", "3.0"),
    Name("Model.fit", "train, evaluate and save, by iterations, by epochs, or by passes with a training cache", "3.0"),
    Name("Model.train", "one iteration", "3.1"),
    Name("Model.eval", "one batch of an evaluation", "3.1"),
    Name("Model.get_current_loss", "the loss of the last iteration", "3.1"),
    Name("Model.get_eval_metrics", "the metrics since the last call", "3.1"),
    Name("Model.start_data_reading", "start both readers", "3.1"),
    Name("Model.set_source", "other data between two calls of fit", "3.1"),
    Name("Model.get_data_reader_train", "the reader of training data", "3.1"),
    Name("Model.get_data_reader_eval", "the reader of evaluation data", "3.1"),
    Name("Model.get_learning_rate_scheduler", "the schedule that fit follows", "3.1"),
    Name("Model.set_learning_rate", "the rate of the next iterations", "3.1"),
    Name("Model.reset_learning_rate_scheduler", "another schedule, from its first step on", "3.1"),
    Name("Model.freeze_dense", "leave the dense layers alone", "3.1"),
    Name("Model.unfreeze_dense", "train them again", "3.1"),
    Name("Model.freeze_embedding", "leave one embedding, or all, alone", "3.1"),
    Name("Model.unfreeze_embedding", "train it again", "3.1"),
    Name("Model.graph_to_json", "write the graph", "3.1"),
    Name("Model.construct_from_json", "add what a graph's file holds", "3.1"),
    Name("Model.save_params_to_files", "write weights and optimizer states", "3.1"),
    Name("Model.load_dense_weights", "read weights of the dense layers", "3.1"),
    Name("Model.load_dense_optimizer_states", "read their optimizer states", "3.1"),
    Name("Model.load_sparse_weights", "read embeddings, as a list or by name", "3.1"),
    Name("Model.load_sparse_optimizer_states", "read their optimizer states", "3.1"),
    Name("Model.embedding_dump", "write tables of a collection", "4.2"),
    Name("Model.embedding_load", "read them", "4.2"),
    Name("Model.check_out_tensor", "a tensor of the last iteration", "4.1"),
    Name("Model.export_predictions", "append the last evaluated batch to text files", "3.0", "23.09"),
    Name("Model.get_incremental_model", "the rows trained since the last call", "3.1", "23.12"),
    Name("Model.get_embedding_training_cache", "the training cache, with `update`", "3.3", "23.12"),
    Name("Model.get_model_oversubscriber", "the same under its older name, with `update` and `store`", "3.1", "3.2"),
    Name(
        "Model.dump_incremental_model_2kafka",
        "post the rows trained to Kafka",
        "3.9",
        NEWEST,
        Status.REFUSED,
        "nothing is sent to Kafka; get_incremental_model hands the rows out",
    ),
    Name("ModelPerfExt", "Model, tuned for MLPerf", "3.3", "3.9"),
)
"""The high-level interface beyond its tables."""

LOW_LEVEL = (
    Name("get_learning_rate_scheduler", "the schedule of a training file", "2.3", "3.0"),
    Name("SolverParser", "the clause solver of a training file", "2.3", "3.0"),
    Name("Session.start_data_reading", "start both readers", "2.3", "3.0"),
    Name("Session.set_learning_rate", "the rate of the next iterations", "2.3", "3.0"),
    Name("Session.train", "one iteration", "2.3", "3.0"),
    Name("Session.eval", "one batch of an evaluation", "2.3", "3.0"),
    Name(
        "Session.evaluation",
        "an evaluation; with two names of files, predictions and labels are appended",
        "2.3",
        "3.0",
    ),
    Name("Session.get_eval_metrics", "the metrics since the last call", "3.0", "3.0"),
    Name("Session.get_current_loss", "the loss of the last iteration", "2.3", "3.0"),
    Name("Session.get_data_reader_train", "the reader of training data", "2.3", "3.0"),
    Name("Session.get_data_reader_eval", "the reader of evaluation data", "2.3", "3.0"),
    Name("Session.get_model_oversubscriber", "what loads the rows of a pass", "2.3", "3.0"),
    Name("Session.download_params_to_files", "write weights and optimizer states", "2.3", "3.0"),
    Name("Session.init_params", "read weights of the dense layers", "2.3", "3.0"),
    Name("Session.get_params_num", "number of the dense layers' weights", "2.3", "3.0"),
    Name(
        "Session.check_overflow",
        "check that embeddings have room",
        "3.0",
        "3.0",
        Status.IGNORED,
        "every iteration checks",
    ),
    Name(
        "Session.copy_weights_for_evaluation",
        "hand the weights to the evaluation",
        "3.0",
        "3.0",
        Status.IGNORED,
        "training and evaluation share their weights",
    ),
)
"""The low-level interface beyond its tables."""

OTHERS = (
    Name("LearningRateScheduler.get_next", "the rate of the next step", "3.1"),
    Name("LearningRateScheduler.get_lr", "the rate of the step that is on", "3.1", "4.3"),
    Name("LearningRateScheduler.get_step", "its number", "3.1", "4.3"),
    Name("TrainingCallback", "base of what is told of training and evaluations", "23.06"),
    Name("IDataReader", "what Model.get_data_reader_train and Model.get_data_reader_eval hand out", "2.3"),
    Name("IDataReader.set_source", "read from the begin of other data, or of the same", "3.0"),
    Name("IDataReader.set_file_list_source", "the same under its older name", "2.3", "2.3"),
    Name("IDataReader.is_started", "whether there is data to read", "3.1"),
    Name("IDataReader.is_eof", "whether the data came to its end", "3.1", "4.3"),
    Name("DataReader32", "IDataReader", "2.3", "23.06"),
    Name("DataReader64", "IDataReader", "2.3", "23.06"),
    Name("EmbeddingTrainingCache", "what Model.get_embedding_training_cache hands out", "3.3", "23.12"),
    Name("ModelOversubscriber", "the same under its older name", "2.3", "3.2"),
    Name("ModelOversubscriber.store", "write each embedding as one file", "2.3", "3.0"),
    Name("tools.DataGenerator", "writes what DataGeneratorParams says", "3.2"),
    Name("EmbeddingCollectionPlaceholder", "EmbeddingCollectionConfig, as a planner makes it", "3.7", "4.1"),
    Name("DataSourceType_t", "FileSystemType_t", "3.4", "4.0"),
    Name("Layer_t.DotProduct", "Layer_t.ElementwiseMultiply", "2.3", "3.5"),
    Name("Layer_t.Multiply", "Layer_t.WeightMultiply, as training files of 2.3 spell it", "2.3", "2.3"),
    Name("data.DataSource", "copies a job's files from HDFS to a disk: `move_to_local`", "3.4", "3.8"),
    Name("inference", "everything in it", "3.0", "24.06", Status.REFUSED, _SERVING),
    Name(
        "Core23DataReader32",
        "a reader of C++",
        "23.08",
        NEWEST,
        Status.REFUSED,
        "Model.get_data_reader_train and Model.get_data_reader_eval hand the readers out",
    ),
    Name(
        "Core23DataReader64",
        "a reader of C++",
        "23.08",
        NEWEST,
        Status.REFUSED,
        "Model.get_data_reader_train and Model.get_data_reader_eval hand the readers out",
    ),
    Name("Holder", "memory of C++", "23.08", NEWEST, Status.REFUSED, "nothing here takes one"),
)
"""What is left."""

COMMANDS = (
    Name(
        "python -m terarec.hugectr SCRIPT.py",
        "a script of any release; `--compat-release 3.1` before it for the order of that one. Where they are not "
        "installed, mpi4py is one of a single process, and mlperf_logging with mlperf_common write their lines",
    ),
    Name("huge_ctr --train", "train a training file: `terarec-hugectr --train`", "2.3", "3.0"),
    Name("huge_ctr --version", "`terarec-hugectr --version`", "2.3", "3.0"),
    Name("huge_ctr --help", "`terarec-hugectr --help`", "2.3", "3.0"),
    Name("data_generator", "random data for a training file: `terarec-hugectr data_generator`", "2.3", "3.0"),
)
"""Commands."""

NAMES = (*MODEL, *LOW_LEVEL, *OTHERS, *COMMANDS)
"""Every name."""
