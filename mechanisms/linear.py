"""Linear attention: softmax's kernel replaced by a feature map, so that the past is one matrix.

Recurrence
    S_t = S_{t-1} + f(k_t) v_t^T        z_t = z_{t-1} + f(k_t)
    o_t = S_t^T f(q_t) / max(z_t . f(q_t), 1e-6)                        with the normaliser
    o_t = RMSNorm( S_t^T f(q_t) / sqrt(K) ), a head                     without
    f = elu + 1, or the identity; with `unit_keys`, f(k) is scaled to length 1

Source
    Katharopoulos et al. 2020 (arXiv 2006.16236), eq. 16-20. Without the normaliser: the form of fla, whose output norm
    takes its place (code). Unit keys: the control that VLA's state norms need; z sums the same unit keys (choice).

State
    S: n_heads * head_dim^2, and with the normaliser z: n_heads * head_dim; 3 tokens of q, k, v.

Cost
    T in compute, constant in memory when decoding.

Limits
    The normaliser needs a positive feature map. No rotary positions.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.linear_attention import linear_attention
from mechanisms._parts import Base, Projections, RmsNorm, Shape, State, unit_norm

REVISION = 1
STATE = "n_heads*head_dim*head_dim + (n_heads*head_dim if normaliser else 0)"
CACHE = "3*conv*n_heads*head_dim"
PARAMS = "n_heads*head_dim*(3*(d_model + (4 if short_conv else 0)) + d_model) + (0 if normaliser else head_dim)"
LIMITS = ["position != 'rope'", "not normaliser or feature_map == 'elu'"]


class Mixer(Base):
    """Linear attention.

    Args:
        feature_map: what q and k go through: elu + 1, or nothing
        normaliser: divide by the sum of the weights; otherwise the output is normalised
        unit_keys: scale each key to length 1 after the feature map
    """

    def __init__(
        self,
        shape: Shape,
        *,
        feature_map: Literal["elu", "identity"] = "elu",
        normaliser: bool = True,
        unit_keys: bool = False,
    ) -> None:
        super().__init__()
        self.shape, self.feature_map = shape, feature_map
        self.normaliser, self.unit_keys = normaliser, unit_keys
        self.project = Projections(shape, shape.head_dim)
        self.norm = None if normaliser else RmsNorm(shape.head_dim)
        self.out = nn.Linear(shape.n_heads * shape.head_dim, shape.d_model, bias=False)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        H, K = self.shape.n_heads, self.shape.head_dim
        acc = torch.promote_types(dtype, torch.float32)
        state = {"S": torch.zeros(batch, H, K, K, device=device, dtype=acc)}
        if self.normaliser:
            state["z"] = torch.zeros(batch, H, K, device=device, dtype=acc)
        return {**state, **self.project.initial_state(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        if self.feature_map == "elu":
            q, k = F.elu(q) + 1, F.elu(k) + 1
        if self.unit_keys:
            k = unit_norm(k)
        start = None
        if state:
            start = (state["S"], state["z"]) if self.normaliser else state["S"]
        o, end = linear_attention(
            q,
            k,
            v,
            scale=self.shape.head_dim**-0.5,
            normalize=self.normaliser,
            initial_state=start,
            impl=self.shape.impl,
        )
        if self.norm is not None:
            o = self.norm(o)
        named = {"S": end[0], "z": end[1]} if isinstance(end, tuple) else {"S": end}
        return self.out(o.flatten(2)), {**named, **carried}
