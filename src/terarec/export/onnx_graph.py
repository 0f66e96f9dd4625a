"""`OnnxGraph`: nodes, constants, inputs and outputs of an ONNX graph under construction."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terarec.errors import MissingDependencyError

OPSET = 18
"""The first in which every reduction takes its axes as an input; ONNX Runtime 1.14 and later run it."""
IR_VERSION = 8
"""The one that came with opset 18, so that runtimes of its time open the file."""
MOST_BYTES = 2**31 - 2**20
"""A protobuf message holds 2 GiB; constants beyond go into a file of their own."""


def onnx_library(name: str = "onnx") -> ModuleType:
    """Return a package that the extra ``onnx`` brings: "onnx", "onnxruntime" or "onnxscript".

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingDependencyError(name, "not installed, expected pip install 'terarec[onnx]'") from None


class OnnxGraph:
    """Builds a graph node by node; values are known by their names.

    Attributes:
        scope: Prefix of the names of the values that are added next, for readers of the graph.
    """

    def __init__(self) -> None:
        self._onnx = onnx_library()
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._count = 0
        # Names are prefixed by the layer that makes them, so that ONNX's messages point to a layer of the model.
        self.scope = ""

    def input(self, name: str, dtype: type[np.generic], dims: Sequence[int | None]) -> str:
        """Return an input [B, ...dims]; None leaves a length open."""
        self._inputs.append(self._value_info(name, dtype, dims))
        return name

    def output(self, name: str, value: str, dims: Sequence[int]) -> None:
        """Make `value` float32[B, ...dims] the output `name`."""
        # A value keeps the name of its node, and one value may be several outputs.
        self._nodes.append(self._onnx.helper.make_node("Identity", [value], [name]))
        self._outputs.append(self._value_info(name, np.float32, dims))

    def constant(self, array: NDArray[np.generic]) -> str:
        """Return a constant of float32, int64, uint8 or bool."""
        name = self._new_name("constant")
        self._constants.append(self._onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def number(self, value: float) -> str:
        """Return a float32 scalar."""
        return self.constant(np.array(value, np.float32))

    def integers(self, *values: int) -> str:
        """Return an int64 vector, as shapes and axes are given."""
        return self.constant(np.array(values, np.int64))

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Return a node with one output, whose name is returned."""
        output = self._new_name(operator)
        self._nodes.append(self._onnx.helper.make_node(operator, list(inputs), [output], **attributes))
        return output

    def reshape(self, value: str, *dims: int) -> str:
        """Return `value` as [-1, ...dims], row-major."""
        # -1 is the length of the batch, which is open.
        return self.node("Reshape", value, self.integers(-1, *dims))

    def slice(self, value: str, start: int, stop: int, *, axis: int) -> str:
        """Return the elements ``start <= i < stop`` along `axis`."""
        return self.node("Slice", value, self.integers(start), self.integers(stop), self.integers(axis))

    def model(self, name: str) -> Any:
        """Return the ``onnx.ModelProto``."""
        helper = self._onnx.helper
        graph = helper.make_graph(self._nodes, name, self._inputs, self._outputs, self._constants)
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="terarec")

    def _value_info(self, name: str, dtype: type[np.generic], dims: Sequence[int | None]) -> Any:
        kind = self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self._onnx.helper.make_tensor_value_info(name, kind, ["batch", *dims])

    def _new_name(self, what: str) -> str:
        self._count += 1
        return f"{self.scope}/{what}_{self._count}"
