"""What a plan costs: exact parameters, updates from every unit, and what a store has measured in place of guesses."""

from __future__ import annotations

from pathlib import Path

import pytest

from runners import model as models
from runners import tasks
from runners.feed import Feed
from runners.schema import Trial
from runners.train import Train
from spec_tools import BASE, plan
from sweeps import costs
from sweeps.catalog import Catalog
from sweeps.costs import Analyst

CATALOG = Catalog()
MQAR = BASE.replace("recall", "mqar")

MODELS = {
    "plain": "{}",
    "untied, post norm, no mlp": "{model.tied: false, model.norm: post, model.mlp: none}",
    "positions, no convolution": "{model.position: learned, model.short_conv: false, model.mlp: {name: gelu, width: 24}}",
    "gated mlp": "{model.mlp: swiglu, model.n_layers: 3}",
    "gated mlp of a width": "{model.mlp: {name: swiglu, width: 40}}",
    "some convolutions": "{model.layers: [base_conv, mechanism], model.n_layers: 4}",
}


def count(trial: Trial) -> int:
    return sum(p.numel() for p in models.build(trial).parameters())


@pytest.mark.parametrize("name", CATALOG.names("mechanism"))
def test_parameters_are_those_of_the_built_model(name: str, tmp_path: Path) -> None:
    """With every choice of every parameter of the mechanism, and several models around it."""
    params = CATALOG.block("mechanism", name).params
    choices = [{}] + [
        {key: value}
        for key, param in params.items()
        for value in (param.type.choices or ((True, False) if "bool" in param.type.scalars else ()))
    ]
    if "expand_v" in params:
        choices.append({"expand_v": 2})
    tried = 0
    for own in choices:
        for around in MODELS.values() if not own else ["{model.n_heads: 2}"]:
            settings = ", ".join(f"{key}: {str(value).lower()}" for key, value in own.items())
            item = f"{{name: {name}, {settings}}}" if settings else f"{{name: {name}}}"
            when = f"when: [{{if: {{mechanism: {name}}}, set: {around}}}]\n" if around != "{}" else ""
            try:
                found = plan(f"{MQAR}axes: {{mechanism: [{item}]}}\n{when}", tmp_path, catalog=CATALOG)
            except Exception as error:
                assert "wants" in str(error)
                continue
            trial = found.members[0].trial
            assert Analyst(CATALOG, costs.CPU).work(trial).n_params == count(trial), (own, around)
            tried += 1
    assert tried >= len(MODELS)


@pytest.mark.parametrize(
    "train",
    [
        "{steps: 17, batch_size: 4}",
        "{epochs: 3, batch_size: 64}",
        "{tokens: 100000, batch_size: 4}",
        "{tokens_per_param: 2, batch_tokens: 512}",
    ],
)
def test_updates_follow_from_every_unit(train: str, tmp_path: Path) -> None:
    text = MQAR.replace("train: {steps: 10, batch_size: 4, lr: 1e-3}", f"train: {train}")
    trial = plan(text + "mechanism: softmax\ntask.examples: 1000\n", tmp_path, catalog=CATALOG).members[0].trial
    settings = Train(**(trial.train or {}))
    task = tasks.build(trial.task)
    feed = Feed(task, settings.rows(task.seq_len), 0, "cpu")  # type: ignore[arg-type]
    work = Analyst(CATALOG, costs.CPU).work(trial)
    exact = settings.n_steps(feed.steps_per_epoch, feed.tokens_per_epoch, count(trial))
    assert work.steps == pytest.approx(exact, abs=1 + exact // 100)
    assert work.tokens == pytest.approx(exact * settings.rows(64) * 64, rel=0.05)
