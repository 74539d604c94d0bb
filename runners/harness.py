"""A trained trial as a model of lm-evaluation-harness (extra `eval`), for any of its tasks:

    python -m runners.harness run --model memsweep --model_args store=runs,trial=4fa7965b --tasks wikitext,swde

`trial` is an id or its beginning, `seq_len` the tokens that the model sees at once (none = the length it was trained
at), `device` cpu or cuda. How text is cut into contexts and windows is the harness's own code; what a model says of
them is `runners/reader.py`, as in the evaluations of a sweep. Generation is greedy, by the mechanism's own step.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from runners import checkpoints, evaluate, train
from runners.model import Model
from runners.reader import BOS, Reader, Tokens, encode
from runners.schema import Exit, Trial, UserError
from runners.store import Store, read_json

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    lacks = f"lm-evaluation-harness cannot be imported ({error}): pip install 'memsweep[eval]'"
    if __name__ == "__main__":
        print(lacks, file=sys.stderr)
        sys.exit(Exit.ENVIRONMENT)
    raise UserError(lacks, Exit.ENVIRONMENT) from error


def load(store: str, trial: str, device: torch.device) -> tuple[Trial, Model]:
    """A trained trial of a store and its model. Raises `UserError` if there is none whose id begins so."""
    opened = Store.open(Path(store))
    found = [name for name in opened.trial_ids() if trial and name.startswith(trial)]
    if len(found) != 1:
        raise UserError(f"{len(found)} trials of the store {store} begin with {trial!r}: one is wanted")
    folder = opened.trial_folder(found[0])
    settings, final = read_json(folder / "settings.json"), checkpoints.load(folder / "checkpoints", checkpoints.FINAL)
    if settings is None or final is None:
        raise UserError(f"trial {found[0]} has no final weights: it is not trained yet, or they were let go of")
    own = Trial.from_settings(settings)
    if own.task["name"] != "text":
        raise UserError(f"trial {own.id} is trained on task {own.task['name']}: a model of text is wanted")
    return own, train.load_model(own, train.Snapshot(final.step, final.tensors, final.meta), device)


@register_model("memsweep")
class TrialModel(TemplateLM):
    """The harness's view of one trial."""

    def __init__(self, store: str, trial: str, seq_len: int | None = None, device: str | None = None, **_: Any) -> None:
        super().__init__()
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        own, model = load(str(store), str(trial), self._device)
        self._dtype = (own.train or {}).get("dtype", "fp32")
        self._reader = Reader(model, self._device, seq_len)

    @property
    def eot_token_id(self) -> int:
        return BOS

    @property
    def max_length(self) -> int:
        return self._reader.window

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> Tokens:
        return encode(string)[1 if add_special_tokens is False else 0 :]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, Tokens, Tokens]], **_: Any
    ) -> list[tuple[float, bool]]:
        with self._precision():
            return self._reader.likelihood([(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        windows = [
            list(map(make_disjoint_window, get_rolling_token_windows(encode(text)[1:], BOS, self.max_length, 1)))
            for (text,) in (request.args for request in requests)
        ]
        said = iter(self._loglikelihood_tokens([(None, *pair) for pairs in windows for pair in pairs]))
        return [sum(next(said)[0] for _ in pairs) for pairs in windows]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Requests with the same wishes are answered together."""
        alike: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(_wishes(request.args[1]), []).append(number)
        found = [""] * len(requests)
        with self._precision():
            for (at_most, until), numbers in alike.items():
                said = self._reader.generate([requests[n].args[0] for n in numbers], at_most, until)
                for number, text in zip(numbers, said, strict=True):
                    found[number] = text
        return found

    @contextlib.contextmanager
    def _precision(self) -> Iterator[None]:
        with evaluate.autocast(self._device, self._dtype):
            yield


def _wishes(settings: dict[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Tokens at most, and what ends a continuation."""
    if settings.get("do_sample") and settings.get("temperature", 1):
        raise UserError("do_sample: generation is greedy here")
    until = settings.get("until") or ()
    return int(settings.get("max_gen_toks", 256)), (until,) if isinstance(until, str) else tuple(until)


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
