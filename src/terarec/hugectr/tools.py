# SPDX-License-Identifier: Apache-2.0
"""hugectr.tools and ``terarec-hugectr data_generator``: random data of HugeCTR's layouts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from terarec.apps.synthetic.records import RecordGenerator, generate_records
from terarec.hugectr.enums import Check_t, DataReaderType_t, Distribution_t, PowerLaw_t
from terarec.hugectr.errors import WrongInputError
from terarec.hugectr.json_files import KEY_TYPES, read_json
from terarec.hugectr.objects import DataGeneratorParams, DataReaderParams, Input
from terarec.hugectr.processes import ranks
from terarec.hugectr.readers import KIND_OF_READER
from terarec.hugectr.training_json import read_training
from terarec.io.opening import copy_file
from terarec.spec import RecordLayout, SparseInput

__all__ = [
    "DataGenerator",
    "DataGeneratorParams",
]

_EXPONENTS = {PowerLaw_t.Long: 0.9, PowerLaw_t.Medium: 1.1, PowerLaw_t.Short: 1.3}


class DataGenerator:
    """Generator of the training and evaluation data that the parameters describe; equal parameters give equal data.

    Raises:
        ConfigError: Parameters that do not fit together.
    """

    def __init__(self, data_generator_params: DataGeneratorParams) -> None:
        self._params = data_generator_params
        self._generator = _generator(data_generator_params)

    def generate(self) -> None:
        """Write both; the data of an existing file list (Norm, Parquet) is kept, as in HugeCTR.

        Of several processes the first one writes, and the others wait for it.

        Raises:
            StorageError: The disk is full.
        """
        ranks().on_first("data_generator", self._generate)

    def _generate(self) -> None:
        params = self._params
        is_listed = self._generator.kind in ("norm", "parquet")
        for source, split, num_files, num_samples in (
            (params.source, "train", params.num_files, params.num_samples),
            (params.eval_source, "val", params.eval_num_files, params.eval_num_samples),
        ):
            path = Path(source)
            if not is_listed:
                generate_records(self._generator, path, split=split, rows_per_file=num_samples)
            # Scripts call the generator on every start, and continue with the data of the first.
            elif not path.exists():
                rows = params.num_samples_per_file
                generate_records(self._generator, path, split=split, num_files=num_files, rows_per_file=rows)


def _generator(params: DataGeneratorParams) -> RecordGenerator:
    nnz = tuple(params.nnz_array) or (1,) * params.num_slot
    layout = RecordLayout(
        label_dim=params.label_dim,
        dense_dim=params.dense_dim,
        inputs=(SparseInput(name="data", nnz_per_slot=nnz, is_fixed_length=True),),
        key_bytes=8 if params.i64_input_key else 4,
        slot_sizes=tuple(params.slot_size_array),
    )
    alpha = _EXPONENTS.get(params.power_law_type, params.alpha)
    return RecordGenerator(
        kind=KIND_OF_READER[params.format],
        layout=layout,
        alpha=alpha if params.dist_type is Distribution_t.PowerLaw else None,
        checksum=params.check_type is Check_t.Sum,
        float_label_dense=params.float_label_dense,
        is_length_random=params.random_nnz,
    )


LAWS = {"long": PowerLaw_t.Long, "medium": PowerLaw_t.Medium, "short": PowerLaw_t.Short}


def generate(arguments: Sequence[str]) -> None:
    """Write the data that ``CONFIG.json DIRECTORY VOCABULARY_SIZE MAX_NNZ [options]`` or ``--config-file`` requests.

    Norm and Parquet files go into the directory, and the lists that the training file names point at them. Raw needs
    the training file alone, which names its files and sizes.

    Raises:
        FileCannotOpenError: No such training file.
        WrongInputError: Its clauses or the arguments do not fit.
    """
    options = _parsed(arguments)
    params, reader = generator_params(options)
    DataGenerator(params).generate()
    if params.format is not DataReaderType_t.Raw:
        for own, wanted in ((params.source, reader.source[0]), (params.eval_source, reader.eval_source)):
            # The generator writes into its directory; training reads the list where the training file says.
            if Path(own).resolve() != Path(wanted).resolve():
                copy_file(own, wanted)


def generator_params(options: argparse.Namespace) -> tuple[DataGeneratorParams, DataReaderParams]:
    """Return the data to generate, and the reader of the training file.

    Raises:
        FileCannotOpenError: No such training file.
        WrongInputError: Its clauses or the options do not fit.
    """
    training = read_training(options.config)
    reader, inputs = training.reader, training.parts[0]
    assert isinstance(inputs, Input)
    sparse = inputs.data_reader_sparse_param_array
    slots = sum(part.slot_num for part in sparse)
    # From the file: `read_training` leaves out the clause `solver`.
    key_type = read_json(options.config).child("solver").take("input_key_type", KEY_TYPES, "I32")
    source, eval_source = _sources(options, reader)
    keys = options.voc_size_array or [max(1, options.vocabulary_size // slots)] * slots
    hotness = [most for part in sparse for most in part.nnz_per_slot]
    for name, values in (("--voc-size-array", keys), ("--nnz-array", options.nnz_array or hotness)):
        if len(values) != slots:
            raise WrongInputError(
                f"data_generator: {name}", f"got {len(values)} numbers, expected one for each of {slots} slots"
            )
    params = DataGeneratorParams(
        format=reader.data_reader_type,
        label_dim=sum(inputs.label_dims),
        dense_dim=inputs.dense_dim,
        num_slot=slots,
        i64_input_key=key_type == "I64",
        source=source,
        eval_source=eval_source,
        slot_size_array=reader.slot_size_array or keys,
        nnz_array=options.nnz_array or [min(options.max_nnz, most) for most in hotness],
        check_type=reader.check_type,
        dist_type=Distribution_t.PowerLaw if options.is_power_law else Distribution_t.Uniform,
        power_law_type=LAWS.get(options.long_tail, PowerLaw_t.Specific),
        alpha=-options.alpha,
        num_files=options.files,
        eval_num_files=options.eval_files,
        num_samples_per_file=options.samples,
        num_samples=reader.num_samples or 1,
        eval_num_samples=reader.eval_num_samples or 1,
        float_label_dense=reader.float_label_dense,
        random_nnz=options.is_length_random,
    )
    return params, reader


def _sources(options: argparse.Namespace, reader: DataReaderParams) -> tuple[str, str]:
    """Return the paths of training and evaluation data: lists in the directory, or the files of Raw."""
    if reader.data_reader_type is DataReaderType_t.Raw:
        return reader.source[0], reader.eval_source
    if options.directory is None:
        raise WrongInputError(
            "data_generator", f"{options.config} reads {reader.data_reader_type.name}, expected a directory"
        )
    directory = Path(options.directory)
    return str(directory / "file_list.txt"), str(directory / "file_list_test.txt")


class _Parser(argparse.ArgumentParser):
    # argparse would print its usage and exit with 2, past the one way in which the command reports.
    def error(self, message: str) -> NoReturn:
        raise WrongInputError("data_generator", message)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of either form, under the names that both have."""
    is_named = any(argument.startswith("--config-file") for argument in arguments)
    parser = _Parser(prog="terarec-hugectr data_generator", add_help=False)
    parser.add_argument("--files", type=int, default=128)
    parser.add_argument("--samples", type=int, default=40960)
    parser.add_argument("--long-tail", "--longtail", choices=sorted(LAWS))
    (_add_named if is_named else _add_placed)(parser)
    options = parser.parse_args(arguments)
    if is_named:
        has_tail = options.distribution.startswith("p")
        options.long_tail = (options.long_tail or "medium") if has_tail and options.alpha is None else None
        options.is_power_law, options.alpha = has_tail, -1.0 if options.alpha is None else options.alpha
        options.eval_files, options.is_length_random = options.files, False
        options.nnz_array = options.nnz_array or ([1] * len(options.voc_size_array or []))
        if options.alpha >= 0:
            raise WrongInputError(
                "data_generator: --alpha", f"got {options.alpha}, expected less than 0: keys go by k^alpha"
            )
    else:
        options.is_power_law, options.eval_files = options.long_tail is not None, max(1, options.files // 4)
    return options


def _add_placed(parser: argparse.ArgumentParser) -> None:
    """Add the options of 2.3 and 3.0: one size for all slots, and a maximum of keys a slot."""
    parser.add_argument("config")
    parser.add_argument("directory", nargs="?")
    parser.add_argument("vocabulary_size", nargs="?", type=int, default=1)
    parser.add_argument("max_nnz", nargs="?", type=int, default=1)
    parser.set_defaults(voc_size_array=None, nnz_array=None, alpha=-1.0, is_length_random=True)


def _add_named(parser: argparse.ArgumentParser) -> None:
    """Add the options of 3.0.1: the size of each slot, and its number of keys."""
    parser.add_argument("--config-file", dest="config", required=True)
    parser.add_argument("--data-folder", dest="directory", default="./")
    parser.add_argument("--voc-size-array", type=_numbers)
    parser.add_argument("--nnz-array", type=_numbers)
    parser.add_argument("--distribution", choices=("powerlaw", "unified"), default="powerlaw")
    parser.add_argument("--alpha", type=float)
    parser.set_defaults(vocabulary_size=1, max_nnz=1)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
