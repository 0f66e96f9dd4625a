"""Whole training steps of DLRM on a device: terarec's tables, or torch's, under the same dense layers."""

from collections.abc import Callable
from functools import partial

import torch
from gpu_tables import WIDTH, Tables
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from terarec.kernels.contract import LaidGradient, RowRule
from terarec.kernels.triton.bag_lookup import bag_lookup
from terarec.kernels.triton.row_update import row_update_
from terarec.nn import MLP, DotInteraction

_NUM_DENSE = 13
_BOTTOM, _TOP = (512, 256, WIDTH), (1024, 1024, 512, 256, 1)
Step = Callable[[], object]


class DenseLayers(nn.Module):
    """MLPs and interaction of Criteo's DLRM."""

    def __init__(self, features: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.bottom = MLP(_NUM_DENSE, _BOTTOM, generator=generator, relus=(True,) * len(_BOTTOM))
        self.interaction = DotInteraction(features + 1, WIDTH)
        self.top = MLP(self.interaction.out_width, _TOP, generator=generator)

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """Logits [B, 1]."""
        first = self.bottom(dense)
        logits: Tensor = self.top(self.interaction(first, pooled.to(first.dtype)))
        return logits


class Sides:
    """Steps on one batch, each with dense layers of its own.

    Args:
        tables: float32 or narrower.
        device: where they are.
        is_bf16: whether the dense layers compute in bfloat16.
    """

    def __init__(self, tables: Tables, device: torch.device, *, is_bf16: bool) -> None:
        self.tables, self.device, self.is_bf16 = tables, device, is_bf16
        self.features = tables.layout.shape[0]
        self.dense = torch.rand(tables.batch, _NUM_DENSE, device=device)
        self.label = (torch.rand(tables.batch, 1, device=device) < 0.3).float()

    def ours(self, on_gpu: bool) -> dict[str, Callable[[], Step]]:
        """How a step runs -> what makes it; compiled, and as a CUDA graph, on a GPU alone."""
        makers: dict[str, Callable[[], Step]] = {"": self.terarec}
        if on_gpu:
            makers[", dense layers compiled"] = partial(self.terarec, is_compiled=True)
            makers[", CUDA graph"] = lambda: captured(self.terarec(is_checked=False))
            makers[", compiled, CUDA graph"] = lambda: captured(self.terarec(is_compiled=True, is_checked=False))
        return makers

    def torchs(self, on_gpu: bool) -> dict[str, Callable[[], Step]]:
        """As `ours`, of torch's own modules; sparse gradients keep them from CUDA graphs."""
        makers: dict[str, Callable[[], Step]] = {"torch": self.plain}
        if on_gpu:
            makers["torch.compile"] = partial(self.plain, is_compiled=True)
        return makers

    def terarec(self, *, is_compiled: bool = False, is_checked: bool = True) -> Step:
        """Lookup, dense layers, exact update of rows."""
        layers, optimizer = self._layers(is_compiled)
        held, rule = self.tables, RowRule(kind="sgd", lr=0.01)

        def step() -> None:
            pooled = bag_lookup(held.weights, held.keys, held.offsets, held.layout, True, is_checked=is_checked)
            self._train(layers, pooled.requires_grad_(), optimizer)
            gradient = LaidGradient(held.keys, held.offsets, pooled.grad, held.layout)
            row_update_(held.weights, (), [gradient], rule, 1, is_checked=is_checked)

        return step

    def plain(self, *, is_compiled: bool = False) -> Step:
        """`nn.EmbeddingBag` over one merged table with sparse gradients, and `optim.SGD`."""
        layers, optimizer = self._layers(is_compiled)
        held = self.tables
        bags = nn.EmbeddingBag.from_pretrained(
            held.weights, mode="sum", sparse=True, freeze=False, include_last_offset=True
        )
        rows_optimizer = torch.optim.SGD(bags.parameters(), lr=0.01)

        def step() -> None:
            by_bag = bags(held.rows, held.offsets).reshape(self.features, held.batch, WIDTH)
            rows_optimizer.zero_grad()
            self._train(layers, by_bag.transpose(0, 1).reshape(held.batch, -1), optimizer)
            rows_optimizer.step()

        return step

    def _layers(self, is_compiled: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        layers = DenseLayers(self.features).to(self.device)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.01, fused=self.device.type == "cuda")
        return (torch.compile(layers) if is_compiled else layers), optimizer  # type: ignore[return-value]

    def _train(self, layers: nn.Module, pooled: Tensor, optimizer: torch.optim.Optimizer) -> None:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.is_bf16):
            logits = layers(self.dense, pooled)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(logits.float(), self.label).backward()
        optimizer.step()


def captured(step: Step) -> Step:
    """`step` as one CUDA graph; it must not wait for the device."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
