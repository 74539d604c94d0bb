"""Language modelling on text: its rows, its scores, where its files are looked for, and what is told of them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional as F

from dashboards import page, report
from dashboards.cells import Cell
from dashboards.stats import summarise
from runners import corpus, driver, evaluate, tasks
from runners import model as models
from runners import train as training
from runners.feed import Feed
from runners.schema import Exit, Plan, Trial, UserError
from runners.store import Store
from runners.train import Snapshot
from sweeps import library
from sweeps.catalog import Catalog
from sweeps.costs import CPU as CPU_RATE
from sweeps.costs import Analyst
from sweeps.plan import load
from sweeps.reader import SpecError
from sweeps.searches import Suggestions

CPU = torch.device("cpu")
CATALOG = Catalog()
BYTES = np.random.default_rng(1).bytes(4000)
"""A text that is no UTF-8, and in which four bytes tell the place."""
SPEC = """\
sweep: letters
task:
  name: text
  data_files: corpus.txt
  seq_len: 16
  valid_examples: 4
model: {d_model: 8, n_layers: 1, mlp: none, short_conv: false}
train: {steps: 3, batch_size: 2, lr: 1e-2}
axes: {mechanism: [softmax, {name: sliding_window, window: 4}]}
compare: [{a: {mechanism: softmax}, b: {mechanism: sliding_window}}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a spec and its text."""
    made = tmp_path / "specs[1]"
    made.mkdir()
    (made / "corpus.txt").write_bytes(BYTES)
    (made / "letters.yaml").write_text(SPEC)
    return made


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


def text(folder: Path, **settings: Any) -> Any:
    return tasks.build({"name": "text", "folder": str(folder), "data_files": "corpus.txt", "seq_len": 16, **settings})


# rows and scores


@pytest.mark.parametrize("length", [2, 7, 16, 400])
def test_rows_of_validation_and_test_are_the_end_of_the_text_each_byte_once(folder: Path, length: int) -> None:
    task = text(folder, seq_len=length, valid_examples=None)
    for split, part in (("valid", BYTES[3200:3600]), ("test", BYTES[3600:])):
        n = task.n_examples(split)
        assert n == len(part) // length
        batch = task.batch(split, torch.arange(n), 0)
        assert bytes(batch.target_BQ.flatten().tolist()) == part[: n * length]
        assert (batch.tokens_BT[:, 0] == 256).all()
        assert torch.equal(batch.tokens_BT[:, 1:], batch.target_BQ[:, :-1])
        assert (batch.position_BQ == torch.arange(length)).all()


def test_training_rows_begin_anywhere_before_that_and_nowhere_else(folder: Path) -> None:
    rows = text(folder).batch("train", torch.arange(8000), 3).target_BQ
    starts = [BYTES.find(bytes(row)) for row in rows.tolist()]
    assert min(starts) == 0
    assert max(starts) == 3200 - 16
    counts, _ = np.histogram(starts, bins=49, range=(0, 3185))
    assert stats.chisquare(counts).pvalue > 1e-3


def test_more_rows_keep_those_there_are_and_more_context_keeps_the_text(folder: Path) -> None:
    few, many = text(folder, valid_examples=5), text(folder, valid_examples=20, examples=7)
    assert (few.n_examples("valid"), many.n_examples("valid")) == (5, 20)
    assert text(folder, valid_examples=1000).n_examples("valid") == 25
    assert few.groups("train") == [range(200)]
    assert many.groups("train") == [range(7)]
    for split in ("train", "valid"):
        a, b = (task.batch(split, torch.arange(5), 1).tokens_BT for task in (few, many))
        assert torch.equal(a, b)
    short, long = (text(folder, seq_len=n).batch("test", torch.arange(400 // n), 0).target_BQ for n in (20, 80))
    assert torch.equal(short.flatten(), long.flatten())


def test_files_of_their_own_and_several_in_their_order(folder: Path) -> None:
    for name in ("b.txt", "a.txt"):
        (folder / name).write_bytes(name.encode() * 10)
    task = text(folder, data_files="[ab].txt", valid_files="corpus.txt", seq_len=8, test_share=0.2)
    both = b"a.txt" * 10 + b"b.txt" * 10
    assert bytes(task._text["train"].tolist()) == both[:80]
    assert bytes(task._text["test"].tolist()) == both[80:]
    assert bytes(task._text["valid"].tolist()) == BYTES
    with pytest.raises(UserError, match="the valid part has 10 bytes, a row 21"):
        text(folder, data_files="[ab].txt", seq_len=21, test_share=0.2).groups("test")


def test_a_text_too_long_for_a_card_gives_the_same_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from runners.tasks import text as module

    here = text(folder).batch("train", torch.arange(9), 0)
    monkeypatch.setattr(module, "ON_THE_CARD", 0)
    assert torch.equal(text(folder).batch("train", torch.arange(9), 0).tokens_BT, here.tokens_BT)


def trial(folder: Path, **train: Any) -> Trial:
    task = {"name": "text", "folder": str(folder), "data_files": "corpus.txt", "seq_len": 16, "valid_examples": 4}
    settings = {"steps": 8, "batch_size": 2, "lr": 1e-2, "eval_every": 4, **train}
    return Trial(
        "t", 0, {"name": "softmax"}, task, {"d_model": 8, "n_layers": 1, "mlp": "none", "short_conv": False}, settings
    )


def test_scores_of_a_part_against_all_its_bytes_at_once(folder: Path) -> None:
    of = trial(folder)
    model = models.build(of)
    found = evaluate.run(model, of, of.task, device=CPU)
    batch = tasks.build(of.task).batch("test", torch.arange(25), 0)
    loss = F.cross_entropy(model(batch.tokens_BT).flatten(0, 1), batch.target_BQ.flatten()).item()
    assert found == {
        "loss": pytest.approx(loss, rel=1e-6),
        "bits_per_byte": pytest.approx(loss / math.log(2), rel=1e-6),
        "perplexity": pytest.approx(math.exp(loss), rel=1e-5),
        "n": 25,
    }
    assert loss == pytest.approx(math.log(257), abs=0.1)


def test_an_interruption_leaves_no_trace(folder: Path) -> None:
    def fit(start: Snapshot | None = None, stop: Callable[[], bool] = lambda: False) -> training.Fit:
        nothing: dict[str, Any] = {"commit": lambda *_: None, "progress": lambda *_: None}
        return training.fit(trial(folder), device=CPU, start=start, should_stop=stop, checkpoint_every_s=1e9, **nothing)

    asked = iter([False] * 5 + [True])
    whole, part = fit(), fit(stop=lambda: next(asked))
    assert (part.status, part.step) == ("interrupted", 5)
    again = fit(part.snapshot)
    assert again.metrics == whole.metrics
    assert {"valid/loss", "valid/perplexity", "valid/bits_per_byte"} <= whole.metrics.keys()
    for name, value in whole.snapshot.tensors.items():
        assert torch.equal(value, again.snapshot.tensors[name]), name


# where files are looked for


def ids(path: Path, **options: Any) -> list[str]:
    return [member.trial.id for member in load(str(path), catalog=CATALOG, **options).members]


def places(path: Path | str, **options: Any) -> set[str]:
    tasks = [member.trial.task for member in load(str(path), catalog=CATALOG, **options).members]
    return {task["folder"] for task in tasks if task["name"] == "text"}


def test_a_path_begins_where_its_spec_lies_and_no_id_depends_on_it(
    folder: Path, tmp_path: Path, elsewhere: None
) -> None:
    spec = folder / "letters.yaml"
    assert places(spec) == {str(folder)}
    before, plan = ids(spec), load(str(spec), catalog=CATALOG)
    assert {part.task["folder"] for member in plan.members for part in member.slices} == {str(folder)}
    assert all("folder" not in member.varying for member in plan.members)
    child = tmp_path / "child.yaml"
    child.write_text("extends: specs[1]/letters.yaml\ntrain.lr: 1e-3\n")
    assert places(child) == {str(folder)}, "the parent wrote the path"
    shutil.copytree(folder, tmp_path / "moved")
    assert ids(tmp_path / "moved" / "letters.yaml") == before
    a, b = (load(str(tmp_path / f / "letters.yaml"), catalog=CATALOG).members[0].trial for f in ("specs[1]", "moved"))
    assert a.task["folder"] != b.task["folder"]
    assert training.data_seed(a) == training.data_seed(b)
    assert torch.equal(models.build(a).embedding.weight, models.build(b).embedding.weight)


def test_the_command_line_begins_here_and_shipped_texts_come_last(folder: Path, elsewhere: None) -> None:
    Path("mine.txt").write_bytes(BYTES)
    assert places(folder / "letters.yaml", sets=["task.data_files=mine.txt"]) == {str(Path.cwd())}
    assert places(folder / "letters.yaml", sets=["task.data_files=coriolanus.txt"]) == {str(library.SHIPPED)}
    assert places("all_mechanisms") == {str(library.SHIPPED)}
    (folder / "coriolanus.txt").write_bytes(BYTES)
    (folder / "letters.yaml").write_text(SPEC.replace("corpus", "coriolanus"))
    assert places(folder / "letters.yaml") == {str(folder)}


# value of data_files and what follows it: (line, column, words)
WRONG = {
    "missing": ("corpsu.txt", 4, 15, "there is no file corpsu.txt in {folder}; did you mean corpus.txt?"),
    "a pattern of none": ("'*.md'", 4, 15, "there is no file *.md"),
    "empty": ("empty.txt", 4, 15, "empty.txt is empty"),
    "a folder": (".", 4, 15, "is a folder: name its files"),
    "short": ("short.txt", 5, 12, "here data_bytes is 50, data_files is short.txt, seq_len is 16"),
    "two sources": ("corpus.txt\n  dataset: wikitext", 5, 3, "one of data_files | dataset is given"),
    "no source": (None, 2, 1, "task needs one of data_files | dataset"),
    "shares": ("corpus.txt\n  valid_share: 0.6\n  test_share: 0.5", 6, 15, "valid_share + test_share < 1"),
    "own test text too short": ("corpus.txt\n  test_files: ten.txt", 6, 12, "seq_len is 16, test_bytes is 10"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_with_a_text_is_told_at_its_place(name: str, folder: Path, elsewhere: None) -> None:
    for other, n in (("empty.txt", 0), ("short.txt", 50), ("ten.txt", 10)):
        (folder / other).write_bytes(b"x" * n)
    value, line, column, words = WRONG[name]
    spec = SPEC.partition("compare")[0].replace(
        "  data_files: corpus.txt\n", "" if value is None else f"  data_files: {value}\n"
    )
    (folder / "letters.yaml").write_text(spec)
    with pytest.raises(SpecError) as caught:
        load(str(folder / "letters.yaml"), catalog=CATALOG)
    (mark, told), *others = caught.value.problems
    assert words.format(folder=folder) in told
    assert (mark.line, mark.column) == (line, column)
    assert not others or name == "shares", "no training text is left then"


@pytest.mark.parametrize("own", ["", "examples: 33", "seq_len: 7", "valid_files: '*.txt'", "valid_examples: 99"])
def test_the_plan_counts_the_rows_of_a_text(own: str, folder: Path) -> None:
    changed = [f"task.{own.replace(': ', '=')}"] if own else []
    spec = folder / "letters.yaml"
    spec.write_text(SPEC.replace("steps: 3", "epochs: 2"))
    member = load(str(spec), catalog=CATALOG, sets=changed).members[0]
    task, settings = tasks.build(member.trial.task), training.Train(**(member.trial.train or {}))
    for part in ("train", "valid", "test"):
        assert corpus.rows(member.trial.task, part) == task.groups(part)[0].stop
    feed = Feed(task, 2, 0, CPU)
    exact = settings.n_steps(feed.steps_per_epoch, feed.tokens_per_epoch, 0)
    assert Analyst(CATALOG, CPU_RATE).work(member.trial).steps == exact


def test_a_search_goes_on_from_its_frozen_plan_wherever_it_runs(folder: Path, elsewhere: None) -> None:
    more = "search: {train.lr: {values: [1e-3, 1e-2]}, sampler: grid}\n"
    (folder / "letters.yaml").write_text(SPEC.replace("lr: 1e-2", "warmup: 0") + more)
    plan = Plan.from_lines(load(str(folder / "letters.yaml"), catalog=CATALOG).to_lines())
    for search in plan.searches:
        assert (search.select, search.directions) == (("valid/loss",), ("min",))
        made = Suggestions(plan, CATALOG)(search.key, {"train.lr": 1e-3})
        assert made.problem is None
        assert made.settings["task"] == plan.members[0].trial.task


# the whole way


def test_from_a_folder_to_a_report_and_what_becomes_of_changed_text(
    folder: Path, tmp_path: Path, store: Store, lines: list[str], elsewhere: None
) -> None:
    def launch(where: Path, **options: Any) -> driver.Summary:
        lines.clear()
        plan = load(str(where / "letters.yaml"), catalog=CATALOG)
        return driver.launch(plan, store=store.root, executor="inline", say=lines.append, **options)

    assert launch(folder).counts == {"complete": 2}
    _, plan = store.plan("letters")
    one = plan.members[0]
    assert store.result(one.trial.id)["stamp"]["data"] == corpus.fingerprint(one.trial.task)
    written = report.build(plan, store.root, "1", tmp_path / "report")
    assert "better in test loss" in written.answer
    page = written.html.read_text()
    assert corpus.fingerprint(one.trial.task) in page
    assert "test/bits_per_byte" in (tmp_path / "report" / "table.csv").read_text()
    # A moved folder is the same text: nothing to do, and nobody stumbles over the other place.
    folder.rename(tmp_path / "moved")
    assert launch(tmp_path / "moved").ran == 0
    assert not any("other" in line for line in lines)
    (tmp_path / "moved" / "corpus.txt").write_bytes(BYTES[::-1])
    assert launch(tmp_path / "moved").ran == 0
    told = "2 trials were made with other data (data corpus.txt changed): kept; --stale rerun trains afresh"
    assert told in lines
    plan = load(str(tmp_path / "moved" / "letters.yaml"), catalog=CATALOG)
    (tmp_path / "moved" / "corpus.txt").unlink()
    again = driver.launch(plan, store=store.root, executor="inline", say=lambda _: None)
    assert again.exit_code == Exit.OK, "all is there: no text is needed"
    with pytest.raises(UserError, match=r"task text: there is no file corpus\.txt"):
        driver.launch(plan, store=store.root, executor="inline", say=lambda _: None, stale="rerun")


def test_a_cell_without_the_sweeps_own_score_shows_the_one_it_has() -> None:
    """As in a sweep over recall and text: accuracy is what it is about, and text has none."""
    scores = {"test/accuracy": summarise([math.nan], (0, 1), "max"), "test/loss": summarise([2.5], None, "min")}
    row = page._cell_row(Cell("a/task-text", "a", "text", 8, 8, 1, {"complete": 1}, scores))
    assert (row["n"], row["mean_text"], row["seeds"]) == ("1", "test loss 2.500", "2.500")
    assert math.isnan(row["mean"]), "it is sorted apart"


# data sets


def test_a_folder_of_documents_and_a_hub_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "docs").mkdir()
    for split, words in (("train", ["one", "two\\n", "three"]), ("validation", ["four"])):
        rows = "".join(f'{{"body": "{word}"}}\n' for word in words)
        (tmp_path / "docs" / f"{split}.jsonl").write_text(rows)
    settings = {"name": "text", "folder": str(tmp_path), "dataset": "docs", "column": "body", "seq_len": 2}
    task = tasks.build({**settings, "test_share": 0.45})
    whole = {part: bytes(found.tolist()) for part, found in task._text.items()}
    assert whole == {"train": b"one\ntwo\n", "valid": b"four\n", "test": b"three\n"}
    assert corpus.fingerprint(task._source) is not None
    with pytest.raises(UserError, match="there is no column 'text'; it has body"):
        tasks.build({**settings, "column": "text"}).groups("train")

    long = {**task._source, "name": "text", "seq_len": 6}
    with pytest.raises(UserError, match="the valid part has 5 bytes, a row 6"):
        corpus.check(long)

    def away(*_: Any) -> None:
        raise ConnectionError("no route to the hub\nand so on")

    monkeypatch.setattr(datasets, "load_dataset", away)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError) as caught:
        corpus.check({**long, "dataset": "some/words"})
    told = "task text: dataset some/words: ConnectionError: no route to the hub (HF_HUB_OFFLINE is set). It is neither"
    assert told in str(caught.value)
    assert caught.value.exit_code == Exit.ENVIRONMENT


def test_real_text(real_data: Path) -> None:
    task = tasks.build({"name": "text", "data_files": str(real_data / "text" / "tinyshakespeare.txt")})
    assert task.n_examples("test") == 111539 // 256
    assert task.batch("train", torch.arange(64), 0).target_BQ.max() < 128
