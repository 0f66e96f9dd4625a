"""A small client of the Open Inference Protocol v2, JSON form, on the standard library's HTTP."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import cached_property
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from terarec.errors import ConfigError, TerarecError
from terarec.serve.protocol import (
    InferRequest,
    ModelMetadata,
    Tensor,
    check_elements,
    decode_infer_response,
    decode_model_metadata,
    encode,
)
from terarec.spec.checks import did_you_mean
from terarec.spec.codec import parse_json


class InferenceError(TerarecError, RuntimeError):
    """The server rejected a request, violated the protocol, or could not be reached."""


class InferenceClient:
    """Client of one model of a server.

    Example:
        >>> client = InferenceClient("http://127.0.0.1:8000", model="dlrm")
        >>> client.infer({"I1": [3, None], ..., "C26": ["a9d771cd", ""]})["score"]  # float32[2, 1]
    """

    def __init__(self, url: str, model: str = "model", timeout_seconds: float = 30.0) -> None:
        self._url = url.rstrip("/")
        self._model = f"{self._url}/v2/models/{quote(model, safe='')}"
        self._timeout_seconds = timeout_seconds
        # Directly to the server, which may be on this machine, without a proxy of the environment.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @cached_property
    def metadata(self) -> ModelMetadata:
        """Inputs and outputs of the model, requested once."""
        return decode_model_metadata(self._call(self._model))

    def infer(
        self, columns: Mapping[str, Sequence[object] | npt.NDArray[np.generic]]
    ) -> dict[str, npt.NDArray[np.generic]]:
        """Score B records.

        Args:
            columns: Raw column -> its B values; None or NaN is missing.

        Returns:
            Output -> array; terarec's own server gives ``{"score": float32[B, L]}``.

        Raises:
            ConfigError: A column that the model does not know, or a value of the wrong type.
            InferenceError: The server rejected the request (its message), or could not be reached.
        """
        # The metadata decides the datatypes: an integer goes out as FP32 where the column is a number.
        datatypes = {item.name: item.datatype for item in self.metadata.inputs}
        tensors = []
        for name, values in columns.items():
            if name not in datatypes:
                hint = did_you_mean(name, datatypes)
                raise ConfigError(
                    f"column {name!r}", f"the model does not know it{hint}, expected one of {', '.join(datatypes)}"
                )
            tensors.append(_tensor(name, datatypes[name], values))
        body = self._call(f"{self._model}/infer", encode(InferRequest(inputs=tuple(tensors))))
        outputs = decode_infer_response(body).outputs
        return {output.name: _array(output) for output in outputs}

    def _call(self, url: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
        try:
            with self._opener.open(request, timeout=self._timeout_seconds) as response:
                answer: bytes = response.read()
                return answer
        except urllib.error.HTTPError as error:
            # HTTPError first, since it is an OSError, too.
            raise InferenceError(url, f"{error.code}: {_reason(error.read())}") from None
        except OSError as error:
            raise InferenceError(url, f"no answer: {getattr(error, 'reason', error)}") from None


def _tensor(name: str, datatype: str, values: Sequence[object] | npt.NDArray[np.generic]) -> Tensor:
    plain = values.tolist() if isinstance(values, np.ndarray) else values
    known = [None if value != value else value for value in plain]  # NaN alone differs from itself
    return Tensor(
        name=name, datatype=datatype, shape=(len(known),), data=check_elements(known, datatype, f"column {name!r}")
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
