"""What every task gives and takes. Letters: B rows, T time, Q labelled positions in a row, V vocabulary.

A task is a class `Task` whose keyword-only parameters are its YAML keys, with

    vocab_size, seq_len     what the model is built for: seq_len is the longest row of training
    order                   "blocks": rows and groups are visited in their order; "mixed": shuffled every epoch
    groups(split)           ranges of row numbers; rows of one group have one shape, a batch never crosses groups
    n_examples(split)       how many rows there are; None = endless: every epoch draws the rows of `groups` afresh
    batch(split, index_B, seed, device)
                            rows `index_B` (on the host), made on `device`. Row i depends on (split, seed, i) and the
                            task's settings alone, whatever shares its batch; valid and test rows ignore the seed
    score(logits_BQV, batch)
                            one value a row for every metric that is a mean over rows
    of_means(means)         the other metrics, which follow from those means; a task without such has no such method

A task of images has rows of patches, floats (B, T, features), in the place of tokens, and

    patches                 what the model is built for in the place of vocab_size
    gather(split)           for metrics that are no means over rows: an object with add(index_B, logits_BQV), called for
                            every batch of an evaluation, and metrics(); a task without such has no such method

A task that trains nothing (TRAINS = False) has vocab_size, seq_len and, in the place of all the rest,

    measure(model, device)  each metric of the model, and `n`, the number of rows behind it

and measures an untrained model, or, if it says EVALUATES = "text", models trained on the task text: it stands in
`evaluate` then, and not where a trial's own task stands.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

SPLITS = ("train", "valid", "test")
NO_LABEL = -100
"""A target that counts for nothing: the default of `torch.nn.functional.cross_entropy`."""


@dataclass(frozen=True)
class Patches:
    """What a model of images reads and says: a row is a grid of patches, row by row."""

    features: int
    """Numbers in a patch."""
    grid: tuple[int, int]
    """Patches from top to bottom, and from left to right."""
    outputs: int
    """Numbers in an answer."""
    pooled: bool
    """One answer for the whole image, from the mean over its patches; else one for each patch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one shape. The model is asked, and judged, at the labelled positions only."""

    tokens_BT: Tensor  # int64; patches of images are floats, (B, T, features)
    position_BQ: Tensor  # int64, where the labels are
    target_BQ: Tensor  # int64, what they are; NO_LABEL where a row has fewer

    def __getitem__(self, rows: slice) -> Batch:
        return Batch(self.tokens_BT[rows], self.position_BQ[rows], self.target_BQ[rows])

    def loss(self, logits_BQV: Tensor) -> Tensor:
        """What is trained on: a sum over the labels, to be divided by their number, `n_labels`."""
        return F.cross_entropy(logits_BQV.flatten(0, 1), self.target_BQ.flatten(), reduction="sum")

    def mean_loss(self, logits_BQV: Tensor) -> Tensor:
        return F.cross_entropy(logits_BQV.flatten(0, 1), self.target_BQ.flatten())

    def n_labels(self) -> Tensor:
        return (self.target_BQ != NO_LABEL).sum()


def label_scores(logits_BQV: Tensor, batch: Batch) -> dict[str, Tensor]:
    """`accuracy` (share of right labels) and `loss` (mean nats a label) of each row, in fp32."""
    logits_BQV = logits_BQV.float()
    right_BQ = logits_BQV.argmax(-1) == batch.target_BQ
    loss_BQ = F.cross_entropy(logits_BQV.flatten(0, 1), batch.target_BQ.flatten(), reduction="none")
    return {"accuracy": right_BQ.float().mean(1), "loss": loss_BQ.view_as(right_BQ).mean(1)}
