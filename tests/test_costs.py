"""What a plan costs: exact parameters, updates from every unit, and what a store has measured in place of guesses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from fake_store import make_plan
from spec_tools import BASE, FAKE, plan, problems

from runners import model as models
from runners import resources, tasks
from runners.feed import Feed
from runners.ledger import Ledger
from runners.owner import Owner
from runners.schema import Exit, Member, Outcome, Status, Trial, UserError
from runners.store import Store, seal, write_json
from runners.train import Train
from sweeps import bill, costs, measured, show_bill, spending
from sweeps.catalog import Catalog
from sweeps.costs import Analyst

CATALOG = Catalog()
MQAR = BASE.replace("recall", "mqar")

MODELS = {
    "plain": "{}",
    "transformer++": "{model.norm_type: rms, model.mlp: swiglu, model.short_conv: false}",
    "rms in a hyper-link": "{model.norm_type: rms, model.block: hyper_link}",
    "untied, post norm, no mlp": "{model.tied: false, model.norm: post, model.mlp: none}",
    "positions": "{model.position: learned, model.short_conv: false, model.mlp: {width: 24, name: gelu}}",
    "gated mlp": "{model.mlp: swiglu, model.n_layers: 3}",
    "gated mlp of a width": "{model.mlp: {name: swiglu, width: 40}}",
    "some convolutions": "{model.layers: [base_conv, mechanism], model.n_layers: 4}",
    "a linked layer with a lobe": "{model.block: hyper_link, model.lobe: causal}",
    "linked layers without mlp": "{model.block: hyper_link, model.mlp: none}",
    "experts": "{model.moe: {name: moe, experts: 3}, model.mlp: {name: gelu, width: 24}}",
    "a hybrid": "{model.layers: [mechanism, base_conv, {name: gsa, slots: 9}, softmax], model.n_layers: 5}",
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
            text = f"{MQAR}axes: {{mechanism: [{item}]}}\n{when}"
            broken = problems(text, tmp_path, catalog=CATALOG)
            if broken:
                assert "wants" in broken[0][2]
                continue
            trial = plan(text, tmp_path, catalog=CATALOG).members[0].trial
            assert Analyst(CATALOG, costs.CPU).work(trial).n_params == count(trial), (own, around)
            tried += 1
    assert tried >= len(MODELS)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_hybrids_state_is_that_of_its_layers(dtype: str, tmp_path: Path) -> None:
    layers = "[mechanism, base_conv, {name: sliding_window, window: 9}, {name: gsa, slots: 9}, softmax]"
    text = f"{MQAR}mechanism: {{name: gla}}\nmodel.layers: {layers}\nmodel.n_layers: 6\ntrain.dtype: {dtype}\n"
    member = plan(text + "model.block: hyper_link\nmodel.lobe: causal\n", tmp_path, catalog=CATALOG).members[0]
    mixers = [mixer for layer in models.build(member.trial).layers for mixer in (layer.mixer, layer.lobe)]
    width = torch.bfloat16 if dtype == "bf16" else torch.float32
    counted = 0
    for mixer in mixers:  # attention's caches are empty at the start, so the state after a whole sequence counts
        kinds = {key: x.dtype for key, x in mixer.initial_state(1, torch.device("cpu"), width).items()}
        state = mixer(torch.zeros(1, 64, 32))[1]
        counted += sum(x.numel() * kinds[key].itemsize for key, x in state.items())
    assert member.state_bytes == counted


@pytest.mark.parametrize(
    "train",
    [
        "{steps: 17, batch_size: 4}",
        "{epochs: 3, batch_size: 64}",
        "{tokens: 100000, batch_size: 4}",
        "{tokens_per_param: 2, batch_tokens: 512}",
        "{tokens_per_param: 20, batch_tokens: 512, max_epochs: 1.5}",
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


# --- what a store has measured ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_cards", lambda: iter(()))
    monkeypatch.setattr(resources, "cores", lambda: 4)
    monkeypatch.setattr(bill, "cores", lambda: 4)


TWO = f"{MQAR}axes: {{mechanism: [softmax, linear]}}\nseeds: 3\n"


def finish(store: Store, member: Member, seconds: float, *, device: str, memory: int = 2**30, gpu: float = 0.0) -> None:
    """The folder of a finished trial, its evaluations included."""
    trial, folder = member.trial, store.trial_folder(member.trial.id)
    store.check_settings(trial)
    steps = (trial.train or {})["steps"]
    row = {"schema": 1, "trial": trial.id, "status": "complete", "step": steps, "wall_s": seconds}
    write_json(folder / "result.json", seal(row | {"peak_mem_bytes": memory, "stamp": {"device": device}}))
    for part in member.slices:
        write_json(folder / "evals" / f"{part.id}.json", seal({"schema": 1, "task": part.task, "metrics": {}}))
    write_json(folder / "attempts" / "1" / "outcome.json", {"status": "complete", "seconds": seconds + 1, "gpu": gpu})


def cells(found: bill.Bill) -> dict[str, bill.CellCost]:
    return {cell.cell: cell for cell in found.cells}


def test_without_a_store_everything_is_estimated(tmp_path: Path) -> None:
    found = bill.make(plan(TWO, tmp_path, catalog=CATALOG), store=tmp_path / "none", catalog=CATALOG)
    assert (found.unit, found.to_run, found.store, found.at_once) == ("CPU-hours", 6, None, 4.0)
    assert {cell.basis for cell in found.cells} == {"estimated"}
    assert found.hours == pytest.approx(sum(3 * (cell.seconds or 0) for cell in found.cells) / 3600)
    assert found.wall_s == pytest.approx(3600 * (found.hours or 0) / 4)
    assert found.memory_bytes == max(cell.memory_bytes or 0 for cell in found.cells)


def test_what_was_measured_replaces_guesses_and_corrects_the_others(tmp_path: Path) -> None:
    planned = plan(TWO, tmp_path, catalog=CATALOG)
    guess = cells(bill.make(planned, catalog=CATALOG))
    store = Store.create(tmp_path / "runs")
    here = measured.device({})[0]
    for member, seconds in zip(planned.members[:2], (29.0, 31.0), strict=True):
        finish(store, member, seconds, device=here)
    found = bill.make(planned, store=store.root, catalog=CATALOG)
    softmax, linear = cells(found)["softmax"], cells(found)["linear"]
    assert (softmax.basis, softmax.seconds, softmax.memory_bytes) == ("measured 2 trials", 31.0, 2**30)
    assert linear.basis == "from 2 trials"
    factor = 31.0 / (guess["softmax"].seconds or 1)
    assert linear.seconds == pytest.approx((guess["linear"].seconds or 0) * factor, rel=0.1)
    assert found.needs == {"nothing": 2, "train": 4, "evaluate": 0, "train again": 0, "train afresh": 0}
    assert (softmax.to_run, linear.to_run) == (1, 3)
    assert not found.is_measured
    longer = bill.make(plan(TWO, tmp_path, catalog=CATALOG, sets=["train.steps=40"]), store=store.root, catalog=CATALOG)
    assert cells(longer)["softmax"].basis == "measured 2 trials"
    assert cells(longer)["softmax"].seconds == pytest.approx(4 * 31.0)
    assert longer.to_run == 6


def test_another_device_says_nothing(tmp_path: Path) -> None:
    planned = plan(TWO, tmp_path, catalog=CATALOG)
    store = Store.create(tmp_path / "runs")
    finish(store, planned.members[0], 30.0, device="Another Chip 9000")
    found = bill.make(planned, store=store.root, catalog=CATALOG)
    assert {cell.basis for cell in found.cells} == {"estimated"}
    assert found.needs["nothing"] == 1


def test_gone_weights_are_counted_as_retraining(tmp_path: Path) -> None:
    planned = plan(TWO, tmp_path, catalog=CATALOG)
    store = Store.create(tmp_path / "runs")
    finish(store, planned.members[0], 30.0, device=measured.device({})[0])
    more = plan(TWO + "evaluate: {task.n_pairs: [2, 4]}\n", tmp_path, catalog=CATALOG)
    found = bill.make(more, store=store.root, catalog=CATALOG)
    assert (found.needs["train again"], found.needs["train"], found.to_run) == (1, 5, 6)
    assert cells(found)["softmax"].to_run == 3
    (store.trial_folder(planned.members[0].trial.id) / "checkpoints" / "final").mkdir(parents=True)
    (store.trial_folder(planned.members[0].trial.id) / "checkpoints" / "final" / "meta.json").write_text("{}")
    found = bill.make(more, store=store.root, catalog=CATALOG)
    assert (found.needs["evaluate"], cells(found)["softmax"].to_run) == (1, 2)


def test_a_gpu_counts_by_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_cards", lambda: iter(["A Card", "A Card"]))
    whole = bill.make(plan(TWO, tmp_path, catalog=CATALOG), catalog=CATALOG)
    assert (whole.device, whole.unit, whole.at_once) == ("A Card", "GPU-hours", 2.0)
    text = TWO + "resources: {gpu: 0.25}\n"
    shared = bill.make(plan(text, tmp_path, catalog=CATALOG), catalog=CATALOG)
    assert shared.at_once == 8.0
    assert shared.hours == pytest.approx((whole.hours or 0) / 4)
    auto = plan(TWO + "resources: {gpu: auto}\n", tmp_path, catalog=CATALOG)
    store = Store.create(tmp_path / "runs")
    finish(store, auto.members[0], 9.0, device="A Card", gpu=0.5)
    packed = cells(bill.make(auto, store=store.root, catalog=CATALOG))
    assert (packed["softmax"].gpu, packed["linear"].gpu) == (0.5, 1.0)
    too_much = bill.make(plan(TWO + "resources: {cpu: 64}\n", tmp_path, catalog=CATALOG), catalog=CATALOG)
    assert "this machine has 4 cores" in too_much.notes[0]


def test_cards_are_named_by_the_drivers_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for number in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / number).mkdir()
        (tmp_path / number / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\n")
    assert list(measured._cards(tmp_path)) == ["NVIDIA H200", "NVIDIA H200"]
    assert list(measured._cards(tmp_path / "none")) == []


def test_a_search_counts_with_all_its_suggestions(tmp_path: Path) -> None:
    text = TWO + "search: {train.lr: {log_uniform: [1e-4, 1e-2]}, trials: 4, select: valid/accuracy, seeds: %s}\n"
    apart = plan(text % 2, tmp_path, catalog=CATALOG)
    for store in (None, Store.create(tmp_path / "runs").root):
        found = bill.make(apart, store=store, catalog=CATALOG)
        assert [(cell.trials, cell.to_run) for cell in found.cells] == [(3 + 8, 3 + 8)] * 2
        assert (found.to_run, found.to_begin) == (22, 22)
        assert found.to_run == apart.n_trainings
    same = plan(text % "same", tmp_path, catalog=CATALOG)
    found = bill.make(same, store=store, catalog=CATALOG)
    assert [cell.trials for cell in found.cells] == [4 * 3] * 2
    assert found.to_begin == same.n_trainings == 24
    part = frozenset(member.trial.id for member in apart.members if member.cell == "linear")
    found = bill.make(apart, store=store, only=part, catalog=CATALOG)
    assert [(cell.cell, cell.trials) for cell in found.cells] == [("linear", 11)]


SEARCH = MQAR + "mechanism: linear\nseeds: 2\nsearch: {%s, trials: 8}\n"


def test_what_is_searched_costs_a_mean_and_is_never_measured(tmp_path: Path) -> None:
    """Ten updates were measured; the search goes up to a hundred thousand."""
    ten = plan(MQAR + "mechanism: linear\nseeds: 2\n", tmp_path, catalog=CATALOG)
    store = Store.create(tmp_path / "runs")
    for member in ten.members:
        finish(store, member, 9.0, device=measured.device({})[0])
    one = bill.make(ten, store=store.root, catalog=CATALOG).cells[0]
    assert (one.seconds, one.basis, one.ranges) == (10.0, "measured 2 trials", {})
    rates = plan(SEARCH % "train.lr: {log_uniform: [1e-4, 1e-2]}", tmp_path, catalog=CATALOG)
    same = bill.make(rates, store=store.root, catalog=CATALOG).cells[0]
    assert (same.seconds, same.basis, same.ranges) == (10.0, "measured 2 trials", {})
    steps = plan(SEARCH % "train.steps: {int_uniform: [10, 100000]}", tmp_path, catalog=CATALOG)
    found = bill.make(steps, store=store.root, catalog=CATALOG)
    (cell,) = found.cells
    assert cell.seconds == pytest.approx(50_000, rel=0.01)
    assert (cell.basis, cell.is_measured) == ("from 2 trials", False)
    assert cell.ranges["steps"] == (10, 100_000)
    assert cell.ranges["seconds"] == pytest.approx((10.0, 100_000.0))
    assert found.wall_s == pytest.approx(max(100_000, 10 * 50_000 / 4), rel=0.01)
    assert show_bill.time_of(cell) == "~14 h (10 s to 28 h)"
    assert any("times are means" in line for line in show_bill.totals(found))


def test_memory_and_state_are_those_of_the_largest_suggestion(tmp_path: Path) -> None:
    small, large = (
        bill.make(plan(MQAR + "mechanism: linear\n", tmp_path, catalog=CATALOG, sets=[rows]), catalog=CATALOG)
        for rows in ("train.batch_size=4", "train.batch_size=400")
    )
    rows = plan(SEARCH % "train.batch_size: {values: [4, 400]}", tmp_path, catalog=CATALOG)
    cell = bill.make(rows, catalog=CATALOG).cells[0]
    assert cell.memory_bytes == large.cells[0].memory_bytes
    assert cell.ranges["memory_bytes"] == (small.cells[0].memory_bytes, large.cells[0].memory_bytes)
    assert cell.ranges["rows"] == (4, 400)
    item = "axes: {mechanism: [{name: hola, block: 8, cache: {int_uniform: [0, 8]}}]}\nsearch: {trials: 4}\n"
    cell = bill.make(plan(MQAR + item, tmp_path, catalog=CATALOG), catalog=CATALOG).cells[0]
    assert cell.state_bytes == cell.ranges["state_bytes"][1] > cell.ranges["state_bytes"][0]


def test_the_budget_is_held_against_what_may_be_suggested(tmp_path: Path) -> None:
    text = SEARCH % "train.steps: {int_uniform: [10, 100000]}" + "budget: {wall: 60}\n"
    with pytest.raises(UserError, match=r"to run; budget\.wall is 60 s"):
        spending.check(plan(text, tmp_path, catalog=CATALOG), tmp_path / "none", None, None, yes=False)


# --- what a person sees -----------------------------------------------------------------------------------------


def test_plan_prints_costs_and_marks_guesses(tmp_path: Path) -> None:
    planned = plan(TWO, tmp_path, catalog=CATALOG)
    found = bill.make(planned, catalog=CATALOG)
    lines = list(show_bill.totals(found))
    assert lines[0].startswith("cost: ~")
    assert "CPU-hours in all" in lines[0]
    assert show_bill.time_of(found.cells[0]).startswith("~")
    store = Store.create(tmp_path / "runs")
    for member in planned.members:
        finish(store, member, 30.0, device=measured.device({})[0])
    done = bill.make(planned, store=store.root, catalog=CATALOG)
    lines = list(show_bill.totals(done))
    assert lines[0] == f"store {store.root}: 6 of 6 trials done, 0 to run"
    assert lines[1].startswith("cost: 0.052 CPU-hours in all")
    assert "~" not in "".join(lines)
    assert (show_bill.time_of(done.cells[0]), show_bill.memory_of(done.cells[0])) == ("31 s", "1 GiB")


def test_a_verdict_that_pairs_cannot_reach_is_said(tmp_path: Path) -> None:
    compare = "compare: [{a: {mechanism: softmax}, b: {mechanism: linear}}]\n"
    for seeds, said in ((3, "out of reach: 6 pairs needed"), (6, "can be reached")):
        planned = plan(TWO.replace("seeds: 3", f"seeds: {seeds}") + compare, tmp_path, catalog=CATALOG)
        assert show_bill.verdict_of(planned, planned.tests[0]) == said
    loss = compare.replace("}]", "}, metric: test/loss}]").replace("}}, metric", "}, metric")
    for seeds, said in ((1, "out of reach: 2 pairs a block needed"), (2, "can be reached")):
        planned = plan(TWO.replace("seeds: 3", f"seeds: {seeds}") + loss, tmp_path, catalog=CATALOG)
        assert show_bill.verdict_of(planned, planned.tests[0]) == said
    blocks = make_plan(1, tasks=[{"seq_len": 32, "n_pairs": n} for n in range(1, 9)])  # pairs enough, no interval
    assert show_bill.verdict_of(blocks, blocks.tests[0]) == "out of reach: 2 pairs a block needed"


def test_settings_that_cannot_be_counted_are_said_not_guessed(tmp_path: Path) -> None:
    found = bill.make(plan(BASE + "mechanism: hola\n", tmp_path), catalog=FAKE)
    assert found.cells[0].seconds is None
    assert "cost: cannot be told, as of hola" in "\n".join(show_bill.totals(found))


# --- above the budget -------------------------------------------------------------------------------------------


def ask_nobody(text: str) -> bool:
    pytest.fail(f"nobody was to be asked: {text}")


def test_above_the_budget_is_refused_asked_or_agreed_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = TWO + "budget: {wall: 1s, max_trials: 4}\n"
    planned = plan(text, tmp_path, catalog=CATALOG)
    nowhere = tmp_path / "none"
    with pytest.raises(UserError) as caught:
        spending.check(planned, nowhere, None, None, yes=False)
    said = str(caught.value)
    assert caught.value.exit_code == Exit.USAGE
    assert re.search(r"~[\d.]+ s to run; budget.wall is 1 s", said)
    assert "6 trainings to begin; budget.max_trials is 4" in said
    assert "--yes launches it" in said
    spending.check(planned, nowhere, None, None, yes=True, ask=ask_nobody)
    asked: list[str] = []
    spending.check(planned, nowhere, None, None, yes=False, ask=lambda question: not asked.append(question))  # type: ignore[func-returns-value]
    assert "Launch it all the same?" in asked[0]
    with pytest.raises(UserError, match="not launched"):
        spending.check(planned, nowhere, None, None, yes=False, ask=lambda _: False)
    part = frozenset(member.trial.id for member in planned.members[:3])
    below = plan(TWO + "budget: {max_trials: 4, gpu_hours: 1e-9}\n", tmp_path, catalog=CATALOG)
    spending.check(below, nowhere, part, None, yes=False, ask=ask_nobody)
    spending.check(plan(TWO, tmp_path, catalog=CATALOG), nowhere, None, None, yes=False, ask=ask_nobody)


def test_what_was_spent_counts_against_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "_cards", lambda: iter(["A Card"]))
    planned = plan(TWO + "budget: {gpu_hours: 2}\n", tmp_path, catalog=CATALOG)
    store = Store.create(tmp_path / "runs")
    spending.check(planned, store.root, None, None, yes=False, ask=ask_nobody)
    ledger, me = Ledger.open(store), Owner.me()
    ledger.record_plan(planned, 1)
    one = planned.members[0].trial.id
    ledger.claim(one, me, gpu=0.5)
    ledger.finish(Outcome(one, 1, Status.INTERRUPTED, seconds=4 * 3600.0))
    with pytest.raises(UserError, match=r"GPU-hours to run and 2 spent; budget.gpu_hours is 2"):
        spending.check(planned, store.root, None, None, yes=False)


def test_a_trial_that_trains_nothing_costs_what_it_reads(tmp_path: Path) -> None:
    text = "sweep: t\nmechanism: linear\ntask: {name: state_norm, rows: 2}\naxes: {task.seq_len: [100, 100000]}"
    short, long = bill.make(plan(text, tmp_path, catalog=CATALOG), catalog=CATALOG).cells
    assert 0 < short.seconds < long.seconds
    assert (short.steps, short.tokens) == (0, 0)
    assert short.n_params == long.n_params > 0
