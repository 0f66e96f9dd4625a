# SPDX-License-Identifier: Apache-2.0
"""Models of several labels with parts of their own: shared bottom, MMoE, PLE and ESMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from terarec.spec import checks
from terarec.spec.network import NetworkSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TowersSpec(NetworkSpec):
    """Base of the specs of models with a tower for each label.

    Attributes:
        tower: Widths of the hidden layers of a label's tower; empty for one linear layer.
    """

    tower: checks.AnyWidths = (64,)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedBottomSpec(TowersSpec):
    """Shared bottom (Caruana 1997): one MLP over all columns, and a tower for each label on top.

    Attributes:
        hidden: Widths of the layers of the shared MLP.
    """

    kind: ClassVar[str] = "shared_bottom"
    hidden: checks.Widths = (256, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class MMoESpec(TowersSpec):
    """MMoE (Ma et al. 2018): experts that the gate of each label mixes for its tower.

    Attributes:
        experts: Number of experts.
        hidden: Widths of the layers of an expert.
        gate: Widths of the hidden layers of a gate; empty for one linear layer, as in the paper.
    """

    kind: ClassVar[str] = "mmoe"
    experts: checks.Layers = 8
    hidden: checks.Widths = (256, 128)
    gate: checks.AnyWidths = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PLESpec(TowersSpec):
    """PLE (Tang et al. 2020): layers of experts that all labels share and experts of each label.

    Attributes:
        layers: Number of extraction layers; one is CGC.
        shared_experts: Experts of a layer that all labels share.
        label_experts: Experts of a layer that each label has.
        hidden: Widths of the layers of an expert.
        gate: Widths of the hidden layers of a gate; empty for one linear layer, as in the paper.
    """

    kind: ClassVar[str] = "ple"
    layers: checks.Layers = 2
    shared_experts: checks.Layers = 1
    label_experts: checks.Layers = 1
    hidden: checks.Widths = (256, 128)
    gate: checks.AnyWidths = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ESMMSpec(TowersSpec):
    """ESMM (Ma et al. 2018): the labels are steps of a funnel, and the probability of one includes those before it."""

    kind: ClassVar[str] = "esmm"
    tower: tuple[int, ...] = (256, 128)
