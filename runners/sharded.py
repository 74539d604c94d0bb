"""A model whose weights, gradients and moments are cut among the processes of a team: torch's `fully_shard` (FSDP2).

Each process holds its share of every parameter and borrows the rest, a layer at a time, while it runs that layer. What
a model needs of a card is then one layer, the embedding and a share of all else. The numbers are those of `FlatAdam`
on whole weights but for the order of sums, and so are snapshots: whole tensors, in the main memory of rank 0.

Evaluations after the training run on rank 0 alone, with whole weights and no moments.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from runners.model import Model
from runners.optimise import FlatAdam, places, room
from runners.team import Team


def cut(model: Model, device: torch.device, team: Team) -> None:
    """Cut every parameter of `model` and move the shares to `device`, a layer at a time."""
    # Layers return states too, which are views; nothing here changes one in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh(device.type, (team.size,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)
        part = cast(FSDPModule, module)
        part.set_force_sum_reduction_for_comms(True)  # a process's gradient is its part of the sum, no mean of its own
        part.set_gradient_divide_factor(1.0)


def whole(value: Tensor, team: Team) -> Tensor:
    """A parameter or its moment in one piece, on rank 0; the others help, and get nothing."""
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().cpu() if team.leads else full.new_empty(0)


def share(full: Tensor, like: Tensor) -> Tensor:
    """This process's part of what `whole` gave, cut as `like` is."""
    full = full.to(like.device)
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(
        full, like.device_mesh, like.placements, src_data_rank=None
    )  # each has it: nothing is sent


class ShardedAdam(FlatAdam):
    """`FlatAdam` on a model that was cut: the same updates, and moments of the same form."""

    def __init__(self, model: nn.Module, no_decay: set[str], *, team: Team, **settings: Any) -> None:
        self._team = team
        named = {name: cast(DTensor, parameter) for name, parameter in model.named_parameters()}
        decayed = [p for name, p in named.items() if name not in no_decay]
        plain = [p for name, p in named.items() if name in no_decay]
        self._groups = [parameters for parameters in (decayed, plain) if parameters]
        # Shares in the same memory as the model's, so that plain Adam moves the weights. Some are empty.
        self._local = {p: nn.Parameter(p.to_local().detach()) for parameters in self._groups for p in parameters}
        self._begin([self._mine(parameters) for parameters in self._groups], bool(decayed), **settings)

    def _mine(self, parameters: list[DTensor]) -> list[nn.Parameter]:
        return [self._local[p] for p in parameters if self._local[p].numel()]

    def _add_up(self, loss: Tensor) -> tuple[list[Tensor], Tensor]:
        for parameter, local in self._local.items():
            grad = cast("DTensor | None", parameter.grad)
            local.grad = None if grad is None else grad.to_local()
        grads = [flat.grad for flat in self.flats if flat.grad is not None]
        squares = torch.stack([torch.linalg.vector_norm(grad) for grad in grads]).square().sum()
        sums = self._team.add(torch.stack([squares, loss]))
        loss.copy_(sums[1])
        return grads, sums[0].sqrt()

    def tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, parameters in enumerate(self._groups):
            states = [self.inner.state.get(flat, {}) for flat in self._mine(parameters)]
            for name in states[0] if states else ():
                one = states[0][name]
                found[f"{number}.{name}"] = one if one.dim() == 0 else self._flat(parameters, name)
        return found

    def _flat(self, parameters: list[DTensor], name: str) -> Tensor:
        """A moment of all parameters of a group, laid out as `FlatAdam` does, on rank 0."""
        flat = torch.zeros(room(parameters) if self._team.leads else 0)
        for parameter, start, stop in places(parameters):
            local = self._local[parameter]
            value = self.inner.state[local][name] if local.numel() else torch.zeros_like(local)
            mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
            cut = DTensor.from_local(value, mesh, parameter.placements, shape=shape, stride=stride)
            full = whole(cut, self._team)
            if self._team.leads:
                flat[start:stop] = full.flatten()
        return flat

    def load(self, tensors: dict[str, Tensor]) -> None:
        for number, parameters in enumerate(self._groups):
            mine = {n.split(".", 1)[1]: t for n, t in tensors.items() if n.startswith(f"{number}.")}
            for parameter, start, stop in places(parameters):
                local = self._local[parameter]
                if local.numel() and mine:
                    self.inner.state[local] = {
                        name: value.to(local.device).clone()
                        if value.dim() == 0
                        else self._part(value[start:stop], parameter)
                        for name, value in mine.items()
                    }

    @staticmethod
    def _part(flat: Tensor, parameter: DTensor) -> Tensor:
        return cast(DTensor, share(flat.view(parameter.shape), parameter)).to_local().clone()
