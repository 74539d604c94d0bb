"""Making suggestions: grid, random, or Optuna's TPE on a study that lives for one round.

Each suggestion is a function of the search, its number, the results of the rounds before, and the suggestions made
before it in its own round (which TPE takes for running ones, so that a round spreads out). The random numbers come
from a digest of the search's key and the number. Optuna is imported when TPE is first asked.
"""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runners.schema import Search, Space, Status, canonical_json, digest
from runners.search import Score

STARTUP = 8
"""Suggestions before TPE has enough to go by; until then values are drawn at random.

Optuna's own default is 10. It is one number for every search, whatever its `trials`: raising those goes on with the
same suggestions.
"""
TRIES = 8
"""How often a suggestion equal to an earlier one is drawn again. After that it is kept, and shares the result."""
MOST_POINTS = 100_000
"""A finite space up to this size is looked through for a value that was not tried yet."""


def tpe_begins(search: Search) -> int:
    """Number of the first suggestion that TPE makes: rounds begin at multiples of `parallel`, and know all before."""
    return -(-STARTUP // search.parallel) * search.parallel


def makers(search: Search) -> str:
    """Who makes a search's suggestions: `grid`, `random (TPE begins after 8)`, `(8 random, 4 TPE)`; behind a count."""
    at_random = tpe_begins(search)
    if search.sampler != "tpe":
        return search.sampler
    if search.trials <= at_random:
        return f"random (TPE begins after {at_random})"
    return f"({at_random} random, {search.trials - at_random} TPE)"


class Round:
    """One round of a search: `known` are the values and scores of all suggestions before it, by number."""

    def __init__(self, search: Search, known: Sequence[tuple[Mapping[str, Any], Score | None]]) -> None:
        self.search, self.known = search, known
        self._running: list[Mapping[str, Any]] = []
        self._seen = {canonical_json(values) for values, _ in known}
        self._tpe: _Tpe | None = None
        self.made_by = search.sampler

    def add(self, values: Mapping[str, Any]) -> None:
        """Note a suggestion of this round, whoever made it."""
        self._running.append(values)
        self._seen.add(canonical_json(values))

    def suggest(self, number: int) -> dict[str, Any]:
        """The values of suggestion `number`: the next one of the round."""
        if self.search.sampler == "grid":
            return _point(self.search.space, number)
        for tries in range(TRIES):
            values = self._draw(number, tries)
            if canonical_json(values) not in self._seen:
                return values
        return self._untried(number) or values

    def _draw(self, number: int, tries: int) -> dict[str, Any]:
        seed = int(digest([self.search.key, number, tries]), 16)
        if self.search.sampler == "random" or len(self.known) < STARTUP:
            self.made_by = "random"
            source = random.Random(seed)
            return {path: value_at(space, source.random()) for path, space in self.search.space.items()}
        if self._tpe is None:
            self._tpe = _Tpe(self.search, self.known)
        self.made_by = self._tpe.name
        return self._tpe.draw(seed % 2**32, self._running)

    def _untried(self, number: int) -> dict[str, Any] | None:
        """A point of a finite space that no suggestion has; None if there is none, or the space is not finite."""
        size = math.prod(space.size for space in self.search.space.values())
        if size > MOST_POINTS:
            return None
        points = (_point(self.search.space, at) for at in range(int(size)))
        left = [values for values in points if canonical_json(values) not in self._seen]
        return left[int(digest([self.search.key, number, "untried"]), 16) % len(left)] if left else None


def _point(space: Mapping[str, Space], number: int) -> dict[str, Any]:
    """Point `number` of a finite space: the last path changes fastest."""
    found = {}
    for path, one in reversed(list(space.items())):
        number, at = divmod(number, int(one.size))
        found[path] = one.values[at] if one.kind == "values" else one.values[0] + at
    return {path: found[path] for path in space}


def value_at(space: Space, share: float) -> Any:
    """The value below which `share` (0 to 1) of the distribution lies."""
    if space.kind == "values":
        return space.values[int(share * len(space.values))]
    low, high = space.values
    if space.kind == "int_uniform":
        return low + int(share * (high - low + 1))
    if space.kind == "log_int_uniform":
        # Each whole number has the part of the logarithmic scale from half below it to half above.
        first, last = math.log(low - 0.5), math.log(high + 0.5)
        return min(max(round(math.exp(first + share * (last - first))), low), high)
    if space.kind == "log_uniform":
        return _rounded(math.exp(math.log(low) + share * (math.log(high) - math.log(low))), low, high)
    return _rounded(low + share * (high - low), low, high)


def _rounded(value: float, low: float, high: float) -> float:
    """Six digits, as generated numbers of a spec have; never outside."""
    return min(max(float(f"{value:.6g}"), low), high)


class _Tpe:
    """Optuna's TPE on the results of earlier rounds. Choices are told to it by their place in the list."""

    def __init__(self, search: Search, known: Sequence[tuple[Mapping[str, Any], Score | None]]) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna, self._search = optuna, search
        self.name = f"optuna {optuna.__version__}"
        self._distributions = {path: self._distribution(space) for path, space in search.space.items()}
        directions = ["maximize" if direction == "max" else "minimize" for direction in search.directions]
        self._study = optuna.create_study(directions=directions)
        self._n_running = 0
        worst = _worst(search, [score for _, score in known if score is not None])
        with _quiet():
            for values, score in known:
                self._add(values, score, worst)

    def draw(self, seed: int, running: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Values for one more suggestion beside those that are `running`."""
        states = self._optuna.trial.TrialState
        with _quiet():
            for values in running[self._n_running :]:
                self._add(values, None, None)
            self._n_running = len(running)
            self._study.sampler = self._optuna.samplers.TPESampler(
                seed=seed, multivariate=True, constant_liar=True, n_startup_trials=1
            )
            asked = self._study.ask(self._distributions)
            self._study.tell(asked, state=states.FAIL)  # it comes back with its rounded values, if it is kept
        return {path: self._value(space, asked.params[path]) for path, space in self._search.space.items()}

    def _add(self, values: Mapping[str, Any], score: Score | None, worst: tuple[float, ...] | None) -> None:
        states = self._optuna.trial.TrialState
        told: dict[str, Any] = {"state": states.RUNNING}
        if score is not None and score.status == Status.PRUNED:
            told = {"state": states.PRUNED, "intermediate_values": {score.step: score.values[0]}}
        elif score is not None:
            scores = score.values or worst
            told = {"state": states.COMPLETE, "values": scores} if scores else {"state": states.FAIL}
        params = {path: self._param(space, values[path]) for path, space in self._search.space.items()}
        made = self._optuna.trial.create_trial(params=params, distributions=self._distributions, **told)
        self._study.add_trial(made)

    def _distribution(self, space: Space) -> Any:
        kinds = self._optuna.distributions
        if space.kind == "values":
            return kinds.CategoricalDistribution(range(len(space.values)))
        kind = kinds.IntDistribution if "int" in space.kind else kinds.FloatDistribution
        return kind(*space.values, log="log" in space.kind)

    @staticmethod
    def _param(space: Space, value: Any) -> Any:
        if space.kind != "values":
            return value
        # Equal numbers of different types are different choices: true is not 1.
        return next(at for at, one in enumerate(space.values) if canonical_json(one) == canonical_json(value))

    @staticmethod
    def _value(space: Space, param: Any) -> Any:
        if space.kind == "values":
            return space.values[param]
        return int(param) if "int" in space.kind else _rounded(float(param), *space.values)


def _worst(search: Search, scores: Sequence[Score]) -> tuple[float, ...] | None:
    """What a refused suggestion scores: the worst of the others, or chance where that is worse; None if unknown."""
    found = []
    whole = [score.values for score in scores if len(score.values) == len(search.select)]
    for at, (name, direction) in enumerate(zip(search.select, search.directions, strict=True)):
        seen = [values[at] for values in whole] + ([search.chance[name]] if name in search.chance else [])
        if not seen:
            return None
        found.append(min(seen) if direction == "max" else max(seen))
    return tuple(found)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Optuna warns of options that are experimental in one release and the default in the next."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
