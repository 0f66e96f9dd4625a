# SPDX-License-Identifier: Apache-2.0
"""A small client of the Open Inference Protocol v2, JSON form, on the standard library's HTTP."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from terarec.errors import ConfigError, TerarecError
from terarec.etl.workflow.raw_values import RawValues, are_rounded, as_seconds, one_column
from terarec.formats.frames import Frame, as_table, is_frame
from terarec.serve.json_codec import check_elements, decode_infer_response, decode_model_metadata, encode
from terarec.serve.padding import LENGTHS, pad, plain_values
from terarec.serve.protocol import INTEGER_BITS, InferRequest, ModelMetadata, Tensor, TensorMetadata
from terarec.spec.checks import did_you_mean, quoted
from terarec.spec.codec import parse_json


class InferenceError(TerarecError, RuntimeError):
    """The server rejected a request, violated the protocol, or could not be reached."""


class InferenceClient:
    """Client of one model of a server.

    Example:
        >>> client = InferenceClient("http://127.0.0.1:8000", model="dlrm")
        >>> client.infer({"I1": [3, None], ..., "C26": ["a9d771cd", ""]})["score"]  # float32[2, 1]
    """

    def __init__(
        self,
        url: str,
        model: str = "model",
        timeout_seconds: float = 30.0,
        *,
        version: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        path = f"/versions/{quote(version, safe='')}" if version else ""
        self._model = f"{self._url}/v2/models/{quote(model, safe='')}{path}"
        self._timeout_seconds = timeout_seconds
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        # Directly to the server, which may be on this machine, without a proxy of the environment.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @cached_property
    def metadata(self) -> ModelMetadata:
        """Inputs and outputs of the model, requested once."""
        return decode_model_metadata(self._call(self._model))

    def infer(self, columns: Mapping[str, RawValues] | Frame) -> dict[str, npt.NDArray[np.generic]]:
        """Score B records.

        Args:
            columns: Raw column -> its B values, or lists of them, as `InferenceSession.predict` takes them; None or NaN
                is missing, in lists a missing item. Or a table in memory, such as a DataFrame.

        Returns:
            Output -> array; terarec's own server gives ``{"score": float32[B, L]}``.

        Raises:
            ConfigError: A column that the model does not know, or a value of the wrong type.
            InferenceError: The server rejected the request (its message), or could not be reached.
        """
        inputs = self.metadata.inputs
        values = columns if isinstance(columns, Mapping) else table_columns(inputs, columns)
        tensors = request_tensors(inputs, values)
        body = self._call(f"{self._model}/infer", encode(InferRequest(inputs=tuple(tensors))))
        outputs = decode_infer_response(body).outputs
        return {output.name: _array(output) for output in outputs}

    def config(self) -> Mapping[str, Any]:
        """Return the model's configuration, in the JSON of Triton's ModelConfig.

        Raises:
            InferenceError: As `infer`; or the server does not have this extension of the protocol.
        """
        config: Mapping[str, Any] = parse_json(self._call(f"{self._model}/config"))
        return config

    def statistics(self, model: str) -> Sequence[Mapping[str, Any]]:
        """Return the counters of a model of the server, as in Triton's ``model_stats``; errors as in `config`."""
        answer = parse_json(self._call(f"{self._url}/v2/models/{quote(model, safe='')}/stats"))
        entries: Sequence[Mapping[str, Any]] = answer.get("model_stats", ())
        return entries

    def _call(self, url: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(url, data=body, headers=self._headers)
        try:
            with self._opener.open(request, timeout=self._timeout_seconds) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            # HTTPError first, since it is an OSError, too.
            raise InferenceError(url, f"{error.code}: {_reason(error.read())}") from None
        except OSError as error:
            raise InferenceError(url, f"no answer: {getattr(error, 'reason', error)}") from None


def table_columns(inputs: Sequence[TensorMetadata], table: Frame) -> Mapping[str, RawValues]:
    """Return the columns of a table in memory that a model has as inputs."""
    if not is_frame(table, "columns"):
        got = type(table).__name__
        raise ConfigError("columns", f"got {got}, expected a dict of columns, or a table (pandas, Polars, Arrow)")
    columns = as_table(table, "columns")
    known = {item.name for item in inputs}
    return {name: columns.column(name) for name in columns.column_names if name in known}


def request_tensors(inputs: Sequence[TensorMetadata], columns: Mapping[str, RawValues]) -> list[Tensor]:
    """Return the tensors of a request.

    Args:
        inputs: Inputs of the model, which decide the datatypes: an integer goes out as FP32 for a number.
        columns: As for `InferenceClient.infer`.

    Raises:
        ConfigError: A column that the model does not know, or a value of the wrong type.
    """
    known = {item.name: item for item in inputs}
    tensors: list[Tensor] = []
    for name, values in columns.items():
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(
                f"column {name!r}", f"the model does not know it{hint}, expected one of {', '.join(known)}"
            )
        tensors += _tensors(known[name], values, known.get(name + LENGTHS))
    return tensors


def _tensors(column: TensorMetadata, values: RawValues, lengths: TensorMetadata | None) -> list[Tensor]:
    """Return the tensor of a column; for lists of which one ends with a missing item their lengths, too.

    A server that describes the input of the lengths gets them in its shape, which is [B, 1] in Triton.
    """
    where = f"column {column.name!r}"
    if column.datatype in INTEGER_BITS:
        values = as_seconds(one_column(values), where)
    is_array = isinstance(values, np.ndarray | pa.Array | pa.ChunkedArray)
    if is_array and column.datatype in INTEGER_BITS and are_rounded(values):
        raise ConfigError(
            where, "got rounded floats, expected integers, which floats of this type hold only below a bound"
        )
    if column.shape[1:] in ((), (1,)):
        single = plain_values(one_column(values))
        return [_tensor(column, single, (len(single), *column.shape[1:]), where)]
    lists: list[list[Any]] = []
    for row, value in enumerate(plain_values(values)):
        if value is not None and not isinstance(value, list):
            raise ConfigError(f"{where}, row {row}", f"got {quoted(value)}, expected a list")
        lists.append(value or [])
    padded = pad(lists)
    tensors = [_tensor(column, padded.values, (len(lists), padded.width), where)]
    if padded.lengths is not None:
        shape = (len(lists), *(() if lengths is None else lengths.shape[1:]))
        tensors.append(Tensor(name=column.name + LENGTHS, datatype="INT64", shape=shape, data=padded.lengths))
    return tensors


def _tensor(column: TensorMetadata, values: list[Any], shape: tuple[int, ...], where: str) -> Tensor:
    if column.datatype in INTEGER_BITS:
        # Tables hold integers of which some are missing as floats.
        values = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
    return Tensor(
        name=column.name, datatype=column.datatype, shape=shape, data=check_elements(values, column.datatype, where)
    )


def _array(tensor: Tensor) -> npt.NDArray[np.generic]:
    """Return the elements: float32 for FP32, otherwise in NumPy's default type."""
    return np.array(tensor.data, dtype=np.float32 if tensor.datatype == "FP32" else None).reshape(tensor.shape)


def _reason(body: bytes) -> str:
    """Return the protocol's error text, or the start of whatever came instead."""
    try:
        return str(parse_json(body)["error"])
    except (ValueError, TypeError, KeyError):
        return repr(body[:200].decode(errors="replace"))
