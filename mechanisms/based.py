"""Based: linear attention whose weights are the second-order Taylor series of softmax's exponential.

Recurrence
    S_t = S_{t-1} + f(k_t) v_t^T        z_t = z_{t-1} + f(k_t)
    o_t = S_t^T f(q_t) / z_t . f(q_t)
    f(q) . f(k) = 1 + s + s^2 / 2,  s = q . k / sqrt(feature_dim): never below 1/2, so neither is the normaliser

Source
    Arora et al. 2024 (arXiv 2402.18668), section 4 (paper): the feature map, feature dimension 16. There f holds each
    product x_i x_j twice; here each unordered pair once, with a weight that keeps f(q) . f(k): the same function with
    153 features in place of 273.
    This is the paper's linear layer. Its model alternates with sliding windows and gated convolutions, which is the
    model's matter. Choice: the short convolution that every mixer here has by default.

State
    n_heads * F * (head_dim + 1) with F = 1 + feature_dim + feature_dim * (feature_dim + 1) / 2; 3 tokens of q, k, v.

Cost
    T in compute, constant in memory when decoding.

Limits
    No rotary positions. With a feature_dim above 21 F is wider than the op's Triton kernel takes, and plain torch runs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels._launch import accumulator
from kernels.linear_attention import linear_attention
from mechanisms._parts import Base, Projections, Shape, State

REVISION = 1
STATE = "n_heads*(1 + feature_dim + feature_dim*(feature_dim + 1)//2)*(head_dim + 1)"
CACHE = "conv*n_heads*(2*feature_dim + head_dim)"
PARAMS = "n_heads*(2*feature_dim + head_dim)*(d_model + (4 if short_conv else 0)) + n_heads*head_dim*d_model"
LIMITS = ["feature_dim >= 1", "position != 'rope'"]


def taylor(x: Tensor) -> Tensor:
    """f of (..., D), (..., 1 + D + D (D + 1) / 2) in x's dtype: one, x, squares, products of pairs, each pair once.

    The pairs are x_i x_{i+r} around a circle, for r = 0 .. D / 2: views and one product, where an index of the upper
    triangle would need a scatter in its backward pass. With an even D the last round holds each pair twice; half of
    it is left out.
    """
    dtype, D = x.dtype, x.shape[-1]
    with torch.autocast(x.device.type, enabled=False):
        x = x.to(accumulator(x)) * D**-0.25
        turned = torch.cat([x, x], -1).unfold(-1, D, 1)[..., : D // 2 + 1, :]
        pairs = (x[..., None, :] * turned).flatten(-2)[..., : D * (D + 1) // 2]
        squares, products = pairs.split([D, D * (D - 1) // 2], -1)
        return torch.cat([torch.ones_like(x[..., :1]), x, squares * 0.5**0.5, products], -1).to(dtype)


class Mixer(Base):
    """Based.

    Args:
        feature_dim: width of q and k before the feature map (features)
    """

    def __init__(self, shape: Shape, *, feature_dim: int = 16) -> None:
        super().__init__()
        self.shape = shape
        self.n_features = 1 + feature_dim + feature_dim * (feature_dim + 1) // 2
        self.project = Projections(shape, shape.head_dim, d_k=feature_dim)
        self.out = nn.Linear(shape.n_heads * shape.head_dim, shape.d_model, bias=False)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        size = (batch, self.shape.n_heads, self.n_features, self.shape.head_dim)
        S = torch.zeros(size, device=device, dtype=torch.promote_types(dtype, torch.float32))
        return {"S": S, "z": torch.zeros_like(S[..., 0]), **self.project.initial_state(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k, v, carried = self.project(x_BTD, state)
        o, (S, z) = linear_attention(
            taylor(q),
            taylor(k),
            v,
            normalize=True,
            initial_state=(state["S"], state["z"]) if state else None,
            impl=self.shape.impl,
        )
        return self.out(o.flatten(2)), {"S": S, "z": z, **carried}
