# SPDX-License-Identifier: Apache-2.0
"""docs/layers.md is generated from the registry; ``python -m tests.nn.test_layers_page > docs/layers.md`` writes it."""

import inspect
import re
from pathlib import Path

from terarec.nn import LAYERS
from terarec.nn.registry import LayerKind
from terarec.spec.checks import REQUIRED

PAGE = Path(__file__).parents[2] / "docs" / "layers.md"
INTRODUCTION = """# Layers by name

Every dense layer and loss has a name, by which `terarec.nn.build_layer` creates it from the shapes of its inputs and
from its options; [graph models](graph-models.md) are described by these names. This page is generated from the registry
(`terarec.nn.LAYERS`); tests compare each layer with its formula in float64.

```python
import torch
from terarec.nn import LAYERS, TensorShape, build_layer

generator = torch.Generator().manual_seed(7)
cross = build_layer("multi_cross", [TensorShape(1, (429,))], {"num_layers": 6}, generator=generator)
assert cross.output_shapes == (TensorShape(1, (429,)),)
assert cross(torch.zeros(32, 429)).shape == (32, 429)
assert [option.name for option in LAYERS["dropout"].options] == ["rate"]
```

A `TensorShape(rows, dims)` is a shape without the batch: the tensor is `[rows * B, ...dims]`, and `rows` is 1 unless
a layer moved a dimension into the first one. Axes count the batch as 0. An option, a value or a shape that does not fit
raises `ConfigError` with the layer, the option and all shapes. Initial weights come from `generator` alone.

* `weight_init`, `bias_init`, `gamma_init` and `beta_init` take "default" (what the formula says), "zero", "xavier_norm"
  (normal with variance 2 / (in + out)), "xavier_uniform" (uniform with that variance) and "uniform"; a layer that does
  not distinguish them uses its default for all but "zero". "uniform" is within 1 / (in + out) for weights and 1 / out
  for biases of `inner_product`, and within 1 / sqrt(in) for `mlp`'s.
* Layers with weights have `file_parameters()` and `set_file_parameters(tensors)`: views of the weights in the order and
  orientation of HugeCTR's dense model files ([hugectr-formats.md](hugectr-formats.md)), given below as "in files".
* Losses give a scalar, the mean over the batch, and `predict(logit)` gives probabilities in float32. Their
  `regularizer` names a penalty on all dense weights: strength / B sum |w| ("l1") or strength / (2 B) sum w^2 ("l2"),
  B the batch size; `GraphModel.loss` adds it, and `terarec.nn.Regularizer` computes it.
"""


def page() -> str:
    trained = [kind for kind in LAYERS.values() if kind.has_weights]
    losses = [kind for kind in LAYERS.values() if kind.is_loss]
    others = [kind for kind in LAYERS.values() if not kind.has_weights and not kind.is_loss]
    parts = [INTRODUCTION]
    for title, kinds in (("Layers with weights", trained), ("Layers without weights", others), ("Losses", losses)):
        parts.append(f"## {title}\n")
        parts += [section(kind) for kind in kinds]
    return "\n".join(parts)


def section(kind: LayerKind) -> str:
    module = kind.module
    text = inspect.getdoc(module)
    assert text is not None
    lines = [f"### {kind.kind}\n", text, ""]
    lines += [f"* shapes: `{module.SHAPES}`", f"* formula: `{module.FORMULA}`"]
    if kind.has_weights:
        files = inspect.getdoc(module.file_tensors)  # type: ignore[attr-defined]
        assert files is not None
        lines.append(f"* in files: {files.removeprefix('Return ')}")
    if kind.options:
        lines += ["", "| option | accepted | default | meaning |", "|---|---|---|---|"]
    for option in kind.options:
        default = "required" if option.default is REQUIRED else f"`{option.default!r}`"
        lines.append(f"| `{option.name}` | {option.accepted} | {default} | {option.meaning} |")
    return "\n".join(lines) + "\n"


def test_the_page_is_the_registry() -> None:
    assert PAGE.read_text() == page() + "\n"


def test_its_python_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "layers.md", "exec"), {})


if __name__ == "__main__":
    print(page())
