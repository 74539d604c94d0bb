"""The one language model every mechanism is put into; nothing else builds a mechanism.

    tokens -> embedding (+ learned positions) -> n_layers x [mixer, then mlp] -> norm -> head, where a label is

Each sub-block joins the stream as x + f(norm(x)) (`norm: pre`) or norm(x + f(x)) (`norm: post`); `block: hyper_link`
joins whole layers (`runners/layers.py`). The head is the embedding transposed unless `tied` is off. A task of images
has patches for tokens: a matrix takes them in the place of the embedding, and the head is one of its own.

Initial weights are a function of (seed, task, model, parameter's name) and of the place in the tensor, never of the
mechanism or of the order of construction: two arms share the weights of every parameter they share, and a longer
table of positions starts with the shorter one. Matrices of `nn.Linear` are normal with deviation 1 / sqrt(inputs),
embeddings with 0.02, biases are zero; a mixer's other parameters are its own (`init_special`).

Letters: B rows, T time, D model width, V vocabulary, Q labelled positions of a row, F width inside an mlp.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mechanisms
from mechanisms._parts import Shape
from runners import streams, tasks
from runners.batch import Patches
from runners.layers import BaseConv, HyperLink, Layer, State, make_norm, memory_lobe
from runners.schema import FOLDER, Trial, UserError

REVISION = 1
LIMITS = [
    "d_model >= 1",
    "n_layers >= 1",
    "n_heads >= 1",
    "head_dim >= 1",
    "d_model % n_heads == 0",
    "n_heads * head_dim == d_model",
    "position != 'rope' or head_dim % 2 == 0",
    "block == 'pre_norm' or norm == 'pre'",
    "lobe == 'none' or block == 'hyper_link'",
    "lobe != 'bidirectional' or not causal",
    "causal or images",
    "moe is None or mlp is not None",
    "layers is None or 'mechanism' in layers",
    "layers is None or len(layers) <= n_layers",
]
OWNERS = [["n_heads", "head_dim"]]
DERIVED = {
    "d_model": "192 if size == '2m' else 256 if size == '5m' else 320 if size == '10m' else 448 if size == '20m' "
    "else 128",
    "n_layers": "4 if size == '2m' else 6 if size == '5m' else 8 if size == '10m' or size == '20m' else 2",
    "n_heads": "d_model // head_dim if head_dim is not None else 1",
    "head_dim": "d_model // n_heads",
}
BLOCKS = {
    "mlp": {"gelu": "GeluMlp", "swiglu": "SwigluMlp"},
    "moe": {"moe": "Moe"},
}
PARAMS = {
    "shell": "vocab_size*d_model*(1 if tied else 2) + (seq_len*d_model if position == 'learned' else 0)"
    " + ((2 if norm_type == 'layer' else 1)*d_model if norm == 'pre' else 0)",
    "patches": "(features + 1)*d_model + (d_model + 1)*outputs + (seq_len*d_model if position == 'learned' else 0)"
    " + ((2 if norm_type == 'layer' else 1)*d_model if norm == 'pre' else 0)",
    "layer": "(2 if norm_type == 'layer' and block == 'pre_norm' else 1)*d_model"
    " + (0 if lobe == 'none' else 3*d_model*d_model)",
    "base_conv": "d_model*d_model + 5*d_model",
    "gelu": "2*d_model*width + width + d_model if width is not None else 8*d_model*d_model + 5*d_model",
    "swiglu": "3*d_model*width if width is not None else 3*d_model*((8*d_model + 95)//96*32)",
    "router": "experts*d_model",
    "mlp_norm": "0 if block == 'hyper_link' else (2 if norm_type == 'layer' else 1)*d_model",
}
"""Parameters of the parts: all but the layers, the same with patches of images, a layer without its mixer and mlp, a
base_conv, an mlp or expert, the router of experts, the norm before an mlp or experts."""
STATE = "0 if lobe == 'none' else d_model*(d_model + 2)"
"""Elements in fp32 that a layer carries besides its mixer's."""
SAME_STREAMS = ["kernels"]
LAYER = ["mechanism", "base_conv"]
"""What a layer may be, besides a mechanism of its own."""

SIZES = {"2m": (192, 4), "5m": (256, 6), "10m": (320, 8), "20m": (448, 8)}
"""(d_model, n_layers) by `size`: that many parameters with swiglu blocks and a byte vocabulary."""

Layers = Sequence[str | dict[str, Any]]


class GeluMlp(nn.Module):
    """W2 gelu(W1 x).

    Args:
        width: features between the two matrices; none = 4 d_model
    """

    LIMITS = ("width is None or width >= 1",)

    def __init__(self, d_model: int, *, width: int | None = None) -> None:
        super().__init__()
        width = 4 * d_model if width is None else width
        self.up = nn.Linear(d_model, width)
        self.down = nn.Linear(width, d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_BTD)))


class SwigluMlp(nn.Module):
    """W2 (silu(W1 x) * W3 x), without biases (Shazeer 2020).

    Args:
        width: features between the matrices; none = 8/3 d_model, rounded up to a multiple of 32
    """

    LIMITS = ("width is None or width >= 1",)

    def __init__(self, d_model: int, *, width: int | None = None) -> None:
        super().__init__()
        width = -(-8 * d_model // 96) * 32 if width is None else width
        self.up = nn.Linear(d_model, 2 * width, bias=False)
        self.down = nn.Linear(width, d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.up(x_BTD).chunk(2, dim=-1)
        return self.down(F.silu(gate_BTF) * up_BTF)


class Moe(nn.Module):
    """A mixture of experts, each an mlp: a token is read by the few that its router scores highest.

        g = softmax(W x)        S_e = g_e / sum of g over the picked        B_e = row e of W
        y = sum over the picked e of S_e FFN_e(x), or S_e FFN_e(x) + B_e (outer), or S_e (FFN_e(x) + B_e) (inner)
        loss of a sequence = balance * E * sum_e f_e g_e, f_e = share of the picks that fell on e, g_e = mean score

    Source: "Exact Linear Attention" (arXiv 2605.18848v1): weights renormalised, balance, outer and inner bias (paper;
    no released code has the bias). Choices: the bias is a row of the router, where the paper says a slice of the
    routing projection; f and g are of one sequence, so that a batch in parts has the loss of the whole. Every expert
    reads every token, with weight 0 where it is not picked: no shape depends on the data.

    Letters: E experts.

    Args:
        experts: how many there are, each an mlp as model.mlp says (count)
        top_k: how many a token is sent to (count); of equal scores the lower number
        bias: none = the experts alone; outer, inner = the router's rows are added to what the picked experts give,
            outside or inside their weights
        balance: weight of the load-balance loss; it is part of the gradient, not of the losses that are shown
    """

    LIMITS = ("experts >= 1", "top_k >= 1", "top_k <= experts", "balance >= 0")

    def __init__(
        self,
        d_model: int,
        expert: Callable[[], nn.Module],
        *,
        experts: int = 4,
        top_k: int = 2,
        bias: Literal["none", "outer", "inner"] = "none",
        balance: float = 0.01,
    ) -> None:
        super().__init__()
        self.router = nn.Linear(d_model, experts, bias=False)
        self.experts = nn.ModuleList(expert() for _ in range(experts))
        self.top_k, self.bias, self.balance = top_k, bias, balance
        self._loss_B: Tensor | None = None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """1 where an expert is picked, the weights S and the scores g, each (..., E), in fp32 or better."""
        with torch.autocast(x.device.type, enabled=False):
            score = F.linear(x.to(torch.promote_types(x.dtype, torch.float32)), self.router.weight).softmax(-1)
            order = score.detach().argsort(stable=True, dim=-1, descending=True)
            picked = torch.zeros_like(score).scatter_(-1, order[..., : self.top_k], 1.0)
            weight = score * picked
            return picked, weight / weight.sum(-1, keepdim=True), score

    def forward(self, x: Tensor) -> Tensor:
        picked, weight, score = self.route(x)
        if self.training and x.dim() == 3:
            share_BE = picked.mean(1) / self.top_k
            self._loss_B = self.balance * len(self.experts) * (share_BE * score.mean(1)).sum(-1)
        y = sum(weight[..., e, None] * expert(x) for e, expert in enumerate(self.experts))
        if self.bias != "none":
            y = y + (picked if self.bias == "outer" else weight) @ self.router.weight
        return cast(Tensor, y)

    def take_loss(self) -> Tensor:
        """The load-balance loss of each row of the last forward pass in training, (B,)."""
        assert self._loss_B is not None, "there was no forward pass in training"
        loss_B, self._loss_B = self._loss_B, None
        return loss_B


class Model(nn.Module):
    """The language model shell.

    Args:
        size: preset of d_model and n_layers, by about how many parameters it gives; none = no preset
        d_model: width of the stream (features); none = by size, 128 without one
        n_layers: mixers in a row (count); none = by size, 2 without one
        n_heads: heads of a mixer (count); none = d_model / head_dim, 1 if that is not given either
        head_dim: width of a head (features); none = d_model / n_heads
        mlp: block after each mixer
        moe: mixture of experts in place of the mlp, each such an mlp
        lobe: side memory over what a hyper_link layer adds to the stream; bidirectional reads what a language model is
            to predict, so it wants a model that is not causal
        block: how sub-blocks join the stream; pre_norm is the plain residual, hyper_link one for the whole layer
        norm: pre = x + f(norm(x)), post = norm(x + f(x))
        norm_type: layer = LayerNorm, rms = RMSNorm; that of a hyper_link is an RMSNorm
        layers: mixers from the first layer on, repeated until n_layers: mechanism, base_conv, or any mechanism, with
            its defaults by name or with settings as {name: sliding_window, window: 64}; none = all are the mechanism
        position: learned = a table added to the embeddings, rope = rotary in every mixer, which attention alone allows;
            a layer of its own may differ: {name: softmax, position: rope}
        short_conv: depthwise convolution of width 4 before q, k and v
        kernels: auto = Triton on a card where an op has it, chunked torch elsewhere; reference is the serial recurrence
        tied: the head is the embedding, transposed; of a task of images it is never
        causal: a position sees only what came before it; images alone may be read both ways
    """

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        mechanism: dict[str, Any],
        patches: Patches | None = None,
        *,
        size: Literal["2m", "5m", "10m", "20m"] | None = None,
        d_model: int | None = None,
        n_layers: int | None = None,
        n_heads: int | None = None,
        head_dim: int | None = None,
        mlp: str | dict[str, Any] | None = "gelu",
        moe: str | dict[str, Any] | None = "none",
        lobe: Literal["none", "causal", "bidirectional"] = "none",
        block: Literal["pre_norm", "hyper_link"] = "pre_norm",
        norm: Literal["pre", "post"] = "pre",
        norm_type: Literal["layer", "rms"] = "layer",
        layers: list[str | dict[str, Any]] | None = None,
        position: Literal["none", "learned", "rope"] = "none",
        short_conv: bool = True,
        kernels: Literal["auto", "chunked", "reference"] = "auto",
        tied: bool = True,
        causal: bool = True,
    ) -> None:
        super().__init__()
        if not causal and patches is None:
            raise UserError("model.causal: false is for tasks of images: what a token is to predict comes after it")
        _check_blocks(block, lobe, norm, _named(moe)[0], _named(mlp)[0], causal)
        preset = SIZES[size] if size else (128, 2)
        d_model, n_layers = d_model or preset[0], n_layers or preset[1]
        n_heads, head_dim = _heads(d_model, n_heads, head_dim)
        self.vocab_size, self.seq_len, self.d_model = vocab_size, seq_len, d_model
        grid = patches.grid if patches else None
        shape = Shape(d_model, n_heads, head_dim, seq_len, short_conv, position, kernels, causal, grid)
        self.causal, self.patches = causal, patches
        self.embedding = nn.Linear(patches.features, d_model) if patches else nn.Embedding(vocab_size, d_model)
        self.positions = nn.Parameter(torch.zeros(seq_len, d_model)) if position == "learned" else None
        self.layers = nn.ModuleList(
            HyperLink(d_model, mixer, _ffn(mlp, moe, d_model), _lobe(lobe, shape), _both_ways(mixer, causal))
            if block == "hyper_link"
            else Layer(d_model, mixer, _ffn(mlp, moe, d_model), norm, norm_type, _both_ways(mixer, causal))
            for mixer in _mixers(layers, n_layers, mechanism, shape)
        )
        self.norm = make_norm(norm_type, d_model) if norm == "pre" else nn.Identity()
        self.head = nn.Linear(d_model, patches.outputs) if patches else None
        if not (tied or patches):
            self.head = nn.Linear(d_model, vocab_size, bias=False)
        self.position_stream = 0

    @torch.no_grad()
    def draw(self, *key: Any) -> None:
        """Draws every weight from the streams of `key`: see this file's docstring."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                _fill(module.weight, module.in_features**-0.5, *key, f"{name}.weight")
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, nn.Embedding):
                _fill(module.weight, 0.02, *key, f"{name}.weight")
        if self.positions is not None:
            self.position_stream = streams.key("weights", *key, "positions")
            self.positions.copy_(self._drawn_positions(0, self.seq_len))
        for number, layer in enumerate(self.layers):
            cast(Layer, layer).mixer.init_special(lambda name, at=number: streams.generator("weights", *key, at, name))

    def _drawn_positions(self, first: int, last: int) -> Tensor:
        index = torch.arange(first * self.d_model, last * self.d_model).view(-1, self.d_model)
        return 0.02 * streams.normal(self.position_stream, index).float()

    def _position(self, first: int, last: int) -> Tensor:
        """Rows first .. last-1 of the table. Rows past the trained length are as drawn: no gradient or decay ever
        reaches them, so this is what a longer table would hold."""
        assert self.positions is not None
        known_TD = self.positions[first:last]
        if last <= self.seq_len:
            return known_TD
        return torch.cat([known_TD, self._drawn_positions(max(first, self.seq_len), last).to(known_TD)])

    def forward(self, tokens_BT: Tensor, position_BQ: Tensor | None = None) -> Tensor:
        """Logits at `position_BQ`, (B, Q, V), or everywhere, (B, T, V).

        Of images, tokens_BT are patches, (B, T, features), and the answers are those of the whole, (B, 1, outputs), or
        of every patch, (B, T, outputs).
        """
        x_BTD = self.embedding(tokens_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self._position(0, tokens_BT.shape[1])
        for layer in self.layers:
            x_BTD, _ = layer(x_BTD)
        if self.patches is not None:
            assert self.head is not None
            x_BTD = self.norm(x_BTD)
            return self.head(x_BTD.mean(1, keepdim=True) if self.patches.pooled else x_BTD)
        if position_BQ is not None:
            x_BTD = x_BTD.gather(1, position_BQ[..., None].expand(-1, -1, self.d_model))
        return self._logits(x_BTD)

    def prefill(self, tokens_BT: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Logits after the last of `tokens_BT`, (B, V), and the state to continue from; itself continues `state`."""
        if not self.causal:
            raise ValueError("a model that is not causal reads whole rows, not one token after the other")
        before = state or {"time": 0, "layers": [None] * len(self.layers)}
        end = before["time"] + tokens_BT.shape[1]
        x_BTD = self.embedding(tokens_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self._position(before["time"], end)
        states = []
        for layer, own in zip(self.layers, before["layers"], strict=True):
            x_BTD, after = layer(x_BTD, own)
            states.append(after)
        return self._logits(x_BTD[:, -1]), {"time": end, "layers": states}

    def step(self, token_B: Tensor, state: State) -> tuple[Tensor, State]:
        """One token more: logits (B, V) and the next state."""
        x_BD = self.embedding(token_B)
        if self.positions is not None:
            x_BD = x_BD + self._position(state["time"], state["time"] + 1)
        states = []
        for layer, before in zip(self.layers, state["layers"], strict=True):
            x_BD, after = cast(Layer, layer).step(x_BD, before)
            states.append(after)
        return self._logits(x_BD), {"time": state["time"] + 1, "layers": states}

    def _logits(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def take_side_loss(self) -> Tensor | None:
        """What training adds to the loss of each row of the last forward pass, (B,); None = nothing."""
        found = [layer.mlp.take_loss() for layer in self.layers if isinstance(layer.mlp, Moe)]
        return torch.stack(found).sum(0) if found else None

    def no_decay(self) -> set[str]:
        """Names of the parameters without weight decay: all but the matrices of `nn.Linear` and the embedding.

        Norms, biases, convolutions, positions and a mixer's gates, decay rates and gains stay where the data puts
        them; decaying them would change what a mechanism is.
        """
        decayed = {
            f"{name}.weight" for name, module in self.named_modules() if isinstance(module, nn.Linear | nn.Embedding)
        }
        return {name for name, _ in self.named_parameters()} - decayed


def build(trial: Trial, device: torch.device | str = "cpu") -> Model:
    """The trial's model with its initial weights, on `device`."""
    task = tasks.build(trial.task)
    model = Model(task.vocab_size, task.seq_len, trial.mechanism, getattr(task, "patches", None), **trial.model)
    model.draw(trial.seed, *stream_settings(trial))
    return model.to(device)


def stream_settings(trial: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the streams of data and weights are keyed by, besides the seed: the task and the model as they differ from
    their defaults. So a parameter added later, with a default that keeps the old behaviour, changes no draw."""
    return (
        {"name": trial.task["name"], **_unusual(tasks.get(trial.task["name"]), trial.task, {FOLDER})},
        _unusual(Model, _resolved(trial.model), {"size", *SAME_STREAMS}),
    )


def _resolved(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings` in one form, whether derived values and block names were written out or not."""
    size = settings.get("size")
    preset = SIZES[size] if size else (128, 2)
    d_model = settings.get("d_model") or preset[0]
    heads, head_dim = _heads(d_model, settings.get("n_heads"), settings.get("head_dim"))
    blocks: dict[str, Any] = {}
    for parameter in BLOCKS:
        name, inner = _named(settings.get(parameter, "gelu" if parameter == "mlp" else "none"))
        inner = {key: value for key, value in inner.items() if value is not None}
        blocks[parameter] = {"name": name, **inner} if inner else name
    derived = {"d_model": d_model, "n_layers": settings.get("n_layers") or preset[1]}
    return {**settings, **derived, "n_heads": heads, "head_dim": head_dim, **blocks}


def _unusual(owner: Any, settings: dict[str, Any], without: set[str]) -> dict[str, Any]:
    defaults = {name: p.default for name, p in inspect.signature(owner.__init__).parameters.items()}
    return {
        key: value
        for key, value in settings.items()
        if key not in without and key in defaults and value != defaults[key]
    }


def _named(block: str | dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """Name and parameters of a block, however it was written."""
    if block is None or isinstance(block, str):
        return block or "none", {}
    return block.get("name", "none"), {key: value for key, value in block.items() if key != "name"}


def _heads(d_model: int, n_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    if n_heads is None:
        n_heads = d_model // head_dim if head_dim else 1
    if head_dim is None:
        head_dim = d_model // n_heads
    if n_heads * head_dim != d_model:
        raise UserError(f"model.d_model {d_model} is not n_heads {n_heads} times head_dim {head_dim}")
    return n_heads, head_dim


def _mixers(layers: Layers | None, n_layers: int, mechanism: dict[str, Any], shape: Shape) -> list[nn.Module]:
    given = layers or ["mechanism"]
    return [_mixer(given[number % len(given)], mechanism, shape) for number in range(n_layers)]


def _mixer(entry: str | dict[str, Any], mechanism: dict[str, Any], shape: Shape) -> nn.Module:
    name, settings = _named(entry)
    if name == "base_conv":
        return BaseConv(shape.d_model)
    if name == "mechanism":
        name, settings = _named(mechanism)
    elif name not in mechanisms.names():
        raise UserError(f"model.layers holds {name!r}; a layer is one of {', '.join([*LAYER, *mechanisms.names()])}")
    shape = dataclasses.replace(shape, position=settings.pop("position", shape.position))
    return mechanisms.get(name)(shape, **settings)


def _mlp(block: str | dict[str, Any] | None, d_model: int) -> nn.Module | None:
    name, settings = _named(block)
    kinds = {"gelu": GeluMlp, "swiglu": SwigluMlp}
    if name == "none":
        return None
    if name not in kinds:
        raise UserError(f"model.mlp {name!r} is none of none, {', '.join(kinds)}")
    return kinds[name](d_model, **settings)


def _ffn(mlp: str | dict[str, Any] | None, moe: str | dict[str, Any] | None, d_model: int) -> nn.Module | None:
    name, settings = _named(moe)
    if name == "none":
        return _mlp(mlp, d_model)
    return Moe(d_model, lambda: cast(nn.Module, _mlp(mlp, d_model)), **settings)


def _both_ways(mixer: nn.Module, causal: bool) -> bool:
    """Whether a layer runs its mixer forwards and backwards."""
    return not causal and not getattr(mixer, "sees_all", False)


def _lobe(lobe: str, shape: Shape) -> nn.Module | None:
    return None if lobe == "none" else memory_lobe(shape, lobe == "causal")


def _check_blocks(block: str, lobe: str, norm: str, moe: str, mlp: str, causal: bool) -> None:
    if lobe == "bidirectional" and causal:
        raise UserError("model.lobe: bidirectional reads the tokens that a language model is to predict; use causal")
    if lobe != "none" and block != "hyper_link":
        raise UserError(
            f"model.lobe {lobe} wants model.block hyper_link: it reads what such a layer adds to the stream"
        )
    if block == "hyper_link" and norm != "pre":
        raise UserError("model.block hyper_link has its norm before the mixer: model.norm is pre")
    if moe != "none" and mlp == "none":
        raise UserError("model.moe wants model.mlp: it says what an expert is")


def _fill(weight: Tensor, std: float, *key: Any) -> None:
    drawn = streams.normal(streams.key("weights", *key), torch.arange(weight.numel()))
    weight.copy_((std * drawn).float().view_as(weight))
