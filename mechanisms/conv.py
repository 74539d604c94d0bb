"""A convolution: what is near is read, by its place alone, and nothing else is.

Recurrence
    u_t = W_up x_t        o_t = W_down silu( sum_{0<=i<k} w_i * u_{t-i} )            k = kernel_size, w_i a channel
    Of an image, in a model that is not causal: the sum is over the k x k patches around patch t, with zeros outside.

Source
    The inverted bottleneck of MobileNetV2 (Sandler et al. 2018, arXiv 1801.04381), its batch norms and its first
    activation left out. Choice: u has as many channels as give it the parameters of attention, 4 d_model n_heads
    head_dim, or just fewer; so it is the twin without memory of mechanisms that mix tokens by their content.
    `short_conv` and `position` are nothing to it.

State
    The last k - 1 tokens of u: (kernel_size - 1) * about 2 n_heads head_dim.

Cost
    T in compute, constant in memory when decoding.

Limits
    The k x k patches want an odd kernel_size, and images of the size that the model was trained on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.short_conv import short_conv
from mechanisms._parts import Base, Shape, State

REVISION = 1
STATE = "0"
CACHE = (
    "(kernel_size - 1)"
    " * max(1, 4*d_model*n_heads*head_dim // (2*d_model + (kernel_size if causal else kernel_size*kernel_size)))"
)
PARAMS = (
    "(2*d_model + (kernel_size if causal else kernel_size*kernel_size))"
    " * max(1, 4*d_model*n_heads*head_dim // (2*d_model + (kernel_size if causal else kernel_size*kernel_size)))"
)
LIMITS = ["kernel_size >= 1", "causal or kernel_size % 2 == 1"]


class Mixer(Base):
    """A depthwise convolution between two projections.

    Args:
        kernel_size: tokens it sees, itself included; of an image the side of the square of patches (count)
    """

    sees_all = True

    def __init__(self, shape: Shape, *, kernel_size: int = 3) -> None:
        super().__init__()
        taps = kernel_size if shape.causal else kernel_size**2
        width = max(1, 4 * shape.d_model * shape.n_heads * shape.head_dim // (2 * shape.d_model + taps))
        self.shape, self.kernel_size, self.width = shape, kernel_size, width
        self.up = nn.Linear(shape.d_model, width, bias=False)
        self.down = nn.Linear(width, shape.d_model, bias=False)
        self.taps = nn.Parameter(torch.zeros(width, taps))

    @torch.no_grad()
    def init_special(self, generator: Callable[[str], torch.Generator]) -> None:
        """Uniform within 1 / sqrt(taps), as torch draws a convolution of one channel."""
        bound = self.taps.shape[1] ** -0.5
        self.taps.uniform_(-bound, bound, generator=generator("taps"))

    def initial_state(self, batch: int, device: torch.device, dtype: torch.dtype) -> State:
        return {"past": torch.zeros(batch, self.kernel_size - 1, self.width, device=device, dtype=dtype)}

    def forward(self, x_BTD: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        u_BTW = self.up(x_BTD)
        if self.shape.causal:
            u_BTW, past = short_conv(u_BTW, self.taps, "silu", state["past"] if state else None, impl=self.shape.impl)
            return self.down(u_BTW), {"past": past}
        y_BTW = F.silu(self._around(u_BTW))
        return self.down(y_BTW), {"past": u_BTW[:, u_BTW.shape[1] - self.kernel_size + 1 :]}

    def _around(self, u_BTW: Tensor) -> Tensor:
        """The sum over the square of patches around each."""
        rows, columns = self.shape.grid or (0, 0)
        if u_BTW.shape[1] != rows * columns:
            raise ValueError(
                f"conv reads images of {rows} x {columns} patches, as in training, not of {u_BTW.shape[1]} in all"
            )
        u_BWRC = u_BTW.unflatten(1, self.shape.grid).permute(0, 3, 1, 2)
        taps_W1KK = self.taps.to(u_BTW.dtype).view(self.width, 1, self.kernel_size, self.kernel_size)
        y_BWRC = F.conv2d(u_BWRC, taps_W1KK, padding=self.kernel_size // 2, groups=self.width)
        return y_BWRC.permute(0, 2, 3, 1).flatten(1, 2)
