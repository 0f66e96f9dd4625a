# SPDX-License-Identifier: Apache-2.0
"""Dense optimizers on a device against the CPU, also with states that were made before the first step."""

from __future__ import annotations

import copy
from functools import partial

import torch
from torch import Tensor, nn

from terarec.optim import build_dense_optimizer
from terarec.optim.dense import dense_states
from terarec.spec import (
    AdaGradSpec,
    AdamSpec,
    AdamWSpec,
    DenseOptimizerSpec,
    FTRLSpec,
    MomentumSpec,
    NesterovSpec,
    RMSPropSpec,
    SGDSpec,
    TorchOptimizerSpec,
)
from tests.on_device import CPU, Case, assert_near, assert_on


def stepped(spec: DenseOptimizerSpec, device: torch.device, *, begins: bool, restarts: bool) -> dict[str, Tensor]:
    """Return the parameters after four steps on `device`.

    With `begins` the states are made first, and with `restarts` another optimizer takes them over.
    """
    parameters = [nn.Parameter(torch.linspace(-1, 1, size).to(device)) for size in (3, 5)]
    optimizer = build_dense_optimizer(spec, parameters)
    for step in range(4):
        if begins and step == 0:
            for held in dense_states(optimizer).values():
                assert_on(device, *held)
                for value in held:
                    value.fill_(0.25)
        if restarts and step == 2:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = build_dense_optimizer(spec, parameters)
            optimizer.load_state_dict(state)
        for parameter in parameters:
            parameter.grad = torch.sin(parameter.detach() * 3 + step)
        optimizer.step()
    for group in optimizer.param_groups:  # a fused kernel would read another's memory
        if group.get("fused"):
            assert_on(device, *(state["step"] for state in optimizer.state.values() if "step" in state), parameters[0])
    return {str(number): parameter.detach() for number, parameter in enumerate(parameters)}


def steps_as_on_the_cpu(spec: DenseOptimizerSpec, device: torch.device) -> None:
    """Raise unless an optimizer moves parameters on `device` as on the CPU."""
    for begins, restarts in ((False, True), (True, False)):
        if begins and isinstance(spec, TorchOptimizerSpec):
            continue  # whose states have no names in files
        found = stepped(spec, device, begins=begins, restarts=restarts)
        assert_near(found, stepped(spec, CPU, begins=begins, restarts=restarts))


_SPECS: dict[str, DenseOptimizerSpec] = {
    "sgd": SGDSpec(lr=0.1),
    "momentum": MomentumSpec(lr=0.1),
    "momentum of rates": MomentumSpec(lr=0.1, lr_in_momentum=True),
    "nesterov": NesterovSpec(lr=0.1),
    "nesterov of rates": NesterovSpec(lr=0.1, lr_in_momentum=True),
    "adagrad": AdaGradSpec(lr=0.1),
    "rmsprop": RMSPropSpec(lr=0.1),
    "adam": AdamSpec(lr=0.1),
    "adam with epsilon hat": AdamSpec(lr=0.1, eps=1e-3, eps_hat=True),
    "adamw": AdamWSpec(lr=0.1),
    "ftrl": FTRLSpec(),
    "one of torch": TorchOptimizerSpec(name="NAdam", lr=0.1),
}
CASES: dict[str, Case] = {f"dense {name}": partial(steps_as_on_the_cpu, spec) for name, spec in _SPECS.items()}
