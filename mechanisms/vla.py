"""Variational linear attention (VLA): a delta rule that writes where a running ridge regression points, not the key.

Recurrence
    A_t   = (lambda0 I + sum_{i <= t} u_i u_i^T)^-1         u_t = W_u k^raw_t, scaled to length 1 / sqrt(K)
    a_t   = A_t k^_t / |A_t k^_t|                           k^_t = k_t / |k_t|
    S_t   = S_{t-1} + a_t (v_t - S_{t-1}^T k^_t)^T          z_t = z_{t-1} + k_t
    o_t   = S_t^T q_t / max(z_t . q_t, 1e-4)                q, k: elu + 1
    y_t   = W_o LayerNorm(o_t), over all heads

Source
    "Variational Linear Attention" (arXiv 2605.11196); of the paper only the abstract was at hand. Recurrence, scales,
    clamp and the norm at the end: the authors' notebook 07 (code), which changes A one token at a time (Sherman and
    Morrison) in fp32. The chunk-parallel form is ours and exact (`kernels/ridge_solve.py`).
    lambda0: 0.1 in that notebook, 10 in their module (code); 0.1 here (choice). `nudge`: their A_t += 1e-3 I at every
    20th token (code); off by default (choice): in fp32 A stays positive without it, and over a long sequence it adds
    up to more than A is where little is written. Their lower bound 1e-4 on 1 + u^T A u is never met and left out.
    `erase` write: a_t erases too, so that the norm of every step is exactly 1; with key it reaches 1.3 (ours).
    `precision` identity: A = I, the delta rule with beta = 1 under the same division (the control).
    Choices: no bias on k; the short convolution, where the model has one, before k^raw is read; a u of
    length 0 stays 0. Unit keys without a delta rule are `linear` with `unit_keys`.

State
    S: n_heads * head_dim^2; the sum of u u^T (with nudge: A, and the number of tokens) n_heads * head_dim^2, none with
    A = I; z: n_heads * head_dim; 3 tokens of q, k, v. All but those fp32: in bf16 A is 15 % off after 256 tokens.

Cost
    T in compute, constant in memory when decoding; a step inverts a K x K matrix.

Limits
    No rotary positions. With nudge a sequence that continues from a state goes token by token.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels._chunk import from_chunks, to_chunks
from kernels._launch import accumulator, full_precision
from kernels.delta_rule import delta_rule
from kernels.linear_attention import linear_attention
from kernels.ridge_solve import SHORTEST, ridge_solve, ridge_solve_step
from mechanisms._parts import Base, Projections, Shape, State, unit_norm

REVISION = 1
STATE = (
    "n_heads*head_dim*(head_dim + 1) + (n_heads*head_dim*head_dim if precision == 'ridge' else 0)"
    " + (1 if precision == 'ridge' and nudge else 0)"
)
CACHE = "3*conv*n_heads*head_dim"
PARAMS = (
    "n_heads*head_dim*(3*(d_model + (4 if short_conv else 0)) + d_model + 2"
    " + (n_heads*head_dim if precision == 'ridge' else 0))"
)
LIMITS = ["lambda0 > 0", "position != 'rope'"]
INERT = {
    "lambda0": "precision == 'identity'",
    "nudge": "precision == 'identity'",
    "erase": "precision == 'identity'",
}

DEN_MIN = 1e-4
NUDGE, PERIOD = 1e-3, 20


class Mixer(Base):
    """Variational linear attention.

    Args:
        lambda0: the ridge: A starts as I / lambda0
        precision: what turns a key into the direction it is written along: the ridge solve, or nothing (A = I)
        erase: what is erased before a write: what the key reads, or what the write direction reads
        nudge: add 1e-3 I to A at every 20th token, as the authors' code does
    """

    def __init__(
        self,
        shape: Shape,
        *,
        lambda0: float = 0.1,
        precision: Literal["ridge", "identity"] = "ridge",
        erase: Literal["key", "write"] = "key",
        nudge: bool = False,
    ) -> None:
        super().__init__()
        self.shape, self.lambda0, self.erase = shape, lambda0, erase
        width = shape.n_heads * shape.head_dim
        self.project = Projections(shape, shape.head_dim)
        self.penalty = nn.Linear(width, width, bias=False) if precision == "ridge" else None
        self.nudge = nudge and precision == "ridge"
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, shape.d_model, bias=False)

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        H, K = self.shape.n_heads, self.shape.head_dim
        acc = torch.promote_types(dtype, torch.float32)
        zero = torch.zeros(batch, H, K, K, device=device, dtype=acc)
        state = {"S": zero, "z": torch.zeros(batch, H, K, device=device, dtype=acc)}
        if self.nudge:
            state["A"] = (torch.eye(K, device=device, dtype=acc) / self.lambda0).repeat(batch, H, 1, 1)
            state["t"] = torch.zeros(batch, device=device, dtype=torch.int32)
        elif self.penalty is not None:
            state["M"] = zero.clone()
        return {**state, **self.project.initial_state(batch, device, dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        q, k_raw, v, carried = self.project(x_BTD, state)
        q, k = (F.elu(x.to(accumulator(x))) + 1 for x in (q, k_raw))
        q, key = q.to(v.dtype), unit_norm(k, SHORTEST)
        write, ends = self._write(k_raw, key, state)
        key, write = key.to(v.dtype), write.to(v.dtype)
        o, S, _ = delta_rule(
            q,
            write if self.erase == "write" else key,
            write if self.erase == "key" and self.penalty is not None else None,
            v,
            scale=1.0,
            initial_state=state["S"] if state else None,
            impl=self.shape.impl,
        )
        den, z = self._denominator(q, k, state["z"] if state else None)
        o = o / den.clamp(min=DEN_MIN)
        return self.out(self.norm(o.flatten(2))), {"S": S, "z": z, **ends, **carried}

    def _denominator(self, q: Tensor, k: Tensor, z_BHK: Tensor | None) -> tuple[Tensor, Tensor]:
        """z_t . q_t (B, T, H, 1) in k's dtype, and the last z. On a card as linear attention with values of 1: torch
        sums over time serially there, a thread a channel."""
        if k.is_cuda and self.shape.impl != "reference":
            ones = k.new_ones(1, 1, 1, 1).expand(*k.shape[:3], 1)
            start = None if z_BHK is None else z_BHK[..., None]
            den, end = linear_attention(q.to(k.dtype), k, ones, initial_state=start, impl=self.shape.impl)
            assert isinstance(end, Tensor)  # the pair comes with a normaliser alone
            return den, end[..., 0]
        z_BTHK = k.cumsum(1) if z_BHK is None else k.cumsum(1) + z_BHK[:, None]
        return (z_BTHK * q).sum(-1, keepdim=True), z_BTHK[:, -1]

    def probe(self, x_BTD: Tensor, state: State) -> dict[str, Tensor]:
        """Of the steps S -> S (I - erase write^T), both of length 1 and at cosine c: c, the norm of a step, which is
        (1 + sqrt(5 - 4c)) / 2, that of their product, and the condition of M, whose root bounds it where M is fixed
        (derived)."""
        k_raw = self.project(x_BTD, None)[1]
        key = unit_norm(F.elu(k_raw.to(accumulator(k_raw))) + 1, SHORTEST)
        write, _ = self._write(k_raw, key, None)
        c = (key * write).sum(-1)
        erase, step_c = (write, torch.ones_like(c)) if self.erase == "write" else (key, c)
        P = torch.eye(key.shape[-1], device=key.device, dtype=key.dtype).expand_as(state["S"])
        for t in range(key.shape[1]):
            P = P - (P @ erase[:, t, :, :, None]) * write[:, t, :, None]
        found = {"write_cosine": c, "step_norm": (1 + (5 - 4 * step_c).clamp(min=1).sqrt()) / 2}
        found["product_norm"] = torch.linalg.matrix_norm(P, 2)
        if self.penalty is not None:
            ridge = torch.eye(key.shape[-1], device=key.device, dtype=torch.float64) * self.lambda0
            values = torch.linalg.eigvalsh(state["A"].double() if self.nudge else state["M"].double() + ridge)
            found["condition"] = values[..., -1] / values[..., 0]
        return found

    def _write(self, k_raw: Tensor, key: Tensor, state: State | None) -> tuple[Tensor, State]:
        """The unit write direction (B, T, H, K), and the part of the state it comes from."""
        if self.penalty is None:
            return key, {}
        B, T, H, K = key.shape
        u = self.penalty(k_raw.flatten(2)).to(key.dtype).unflatten(2, (H, K))
        u = unit_norm(u) * K**-0.5
        if not self.nudge:
            start = state["M"] if state else None
            u, key = u.to(k_raw.dtype), key.to(k_raw.dtype)  # M and its inverse are in fp32 inside
            write, M = ridge_solve(u, key, self.lambda0, unit=True, initial_state=start, impl=self.shape.impl)
            return write, {"M": M}
        if state is None and self.shape.impl != "reference":
            alpha, A = nudged_chunks(u, key, self.lambda0)
            t = torch.full((B,), T, device=key.device, dtype=torch.int32)
        else:
            state = state or self.initial_state(B, key.device, key.dtype)
            alpha, A = nudged(u, key, state["A"], state["t"])
            t = state["t"] + T
        return unit_norm(alpha, SHORTEST), {"A": A, "t": t}


@full_precision
def nudged(u: Tensor, x: Tensor, A: Tensor, t_B: Tensor) -> tuple[Tensor, Tensor]:
    """The law with the nudge: u, x (B, T, H, K), A (B, H, K, K) after t_B tokens -> A_t x_t, last A."""
    out, identity = [], torch.eye(A.shape[-1], device=A.device, dtype=A.dtype)
    for i in range(x.shape[1]):
        _, A = ridge_solve_step(A, u[:, i], x[:, i])
        due_B = ((t_B + i + 1) % PERIOD == 0).to(A.dtype)
        A = A + NUDGE * due_B[:, None, None, None] * identity
        out.append(torch.einsum("bhij,bhj->bhi", A, x[:, i]))
    return torch.stack(out, 1), A


@full_precision
def nudged_chunks(u: Tensor, x: Tensor, lambda0: float) -> tuple[Tensor, Tensor]:
    """`nudged` from the first token on, in chunks that end where a nudge falls; P, R, Y as in `ridge_solve`."""
    B, T, H, K = x.shape
    U, X = to_chunks(u, PERIOD), to_chunks(x, PERIOD)
    within, identity = (torch.eye(n, device=x.device, dtype=x.dtype) for n in (PERIOD, K))
    A, out = (identity / lambda0).expand(B * H, K, K), []
    for n in range(U.shape[0]):
        P = U[n] @ A
        R, _ = torch.linalg.cholesky_ex(within + P @ U[n].mT)
        Y = torch.linalg.solve_triangular(R, P, upper=False)
        out.append(X[n] @ A - (X[n] @ Y.mT).tril() @ Y + NUDGE * within[:, -1:] * X[n])
        A = A - Y.mT @ Y + (NUDGE * identity if (n + 1) * PERIOD <= T else 0)
    return from_chunks(torch.stack(out), B, T), A.unflatten(0, (B, H))
