"""hugectr.tools: random data of HugeCTR's layouts."""

from __future__ import annotations

from pathlib import Path

from terarec.data.records import RecordGenerator, RecordLayout, SparseInput, generate_records
from terarec.formats.hugectr import RecordKind
from terarec.hugectr.enums import Check_t, DataReaderType_t, Distribution_t, PowerLaw_t
from terarec.hugectr.tables.generator import DataGeneratorParams

__all__ = ["DataGenerator", "DataGeneratorParams"]

_KINDS: dict[DataReaderType_t, RecordKind] = {
    DataReaderType_t.Norm: "norm",
    DataReaderType_t.Parquet: "parquet",
    DataReaderType_t.Raw: "raw",
    DataReaderType_t.RawAsync: "raw_async",
}
_EXPONENTS = {PowerLaw_t.Long: 0.9, PowerLaw_t.Medium: 1.1, PowerLaw_t.Short: 1.3}


class DataGenerator:
    """Writes the training and evaluation data that the parameters describe; the same ones give the same data.

    Args:
        data_generator_params: what to write.

    Raises:
        ConfigError: parameters that do not fit together.
    """

    def __init__(self, data_generator_params: DataGeneratorParams) -> None:
        self._params = data_generator_params
        self._generator = _generator(data_generator_params)

    def generate(self) -> None:
        """Write both; a file list (Norm, Parquet) that is there already keeps its data, as upstream.

        Raises:
            StorageError: the disk is full.
        """
        params = self._params
        is_listed = self._generator.kind in ("norm", "parquet")
        for source, split, num_files, num_samples in (
            (params.source, "train", params.num_files, params.num_samples),
            (params.eval_source, "val", params.eval_num_files, params.eval_num_samples),
        ):
            path = Path(source)
            if not is_listed:
                generate_records(self._generator, path, split=split, rows_per_file=num_samples)
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
        kind=_KINDS[params.format],
        layout=layout,
        alpha=alpha if params.dist_type is Distribution_t.PowerLaw else None,
        checksum=params.check_type is Check_t.Sum,
        float_label_dense=params.float_label_dense,
        is_length_random=params.random_nnz,
    )
