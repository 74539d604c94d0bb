"""Zero-shot evaluations of models of text: what a reader says, against a slow obvious version; scores; errors."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from runners import corpus, documents, driver, evaluate, tasks
from runners import model as models
from runners.reader import BOS, Reader, encode
from runners.schema import Exit, Trial, UserError
from runners.store import Store
from runners.tasks import completion, lambada, wikitext
from sweeps.catalog import Catalog
from sweeps.plan import load
from sweeps.reader import SpecError

CPU = torch.device("cpu")
CATALOG = Catalog()
TEXTS = ["", "a", "Ärger", "one two three.", "x" * 40, "the end of a line\nand the next", "a b c d e f g h i j k l"]
PAGE = ' = Stone = \n \n It is a stone , of 2 @.@ 5 kg . " Clear " ( very ) . \n \n = = Use = = \n \n None . \n'
SPEC = """\
sweep: zero
task: {name: text, data_files: $STDLIB/abc.py, seq_len: 24, valid_examples: 2, test_examples: 4}
model: {d_model: 8, n_layers: 1, mlp: none, short_conv: false}
train: {steps: 2, batch_size: 2, lr: 1e-2}
axes: {mechanism: [linear]}
evaluate:
  held_out: {}
"""


def make(name: str = "softmax", **model: Any) -> models.Model:
    settings = {"d_model": 16, "n_layers": 1, **model}
    trial = Trial("t", 3, {"name": name}, {"name": "text", "data_files": "-", "seq_len": 24}, settings, None)
    made = models.build(trial)
    with torch.no_grad():
        made.embedding.weight[32:127] *= 40  # answers are letters, likelier than others by more than rounding
    return made.double()


def slow(model: models.Model, row: list[int], n: int) -> tuple[float, bool]:
    """Log-likelihood of the last n tokens of a row, and whether greedy, one pass for each."""
    total, greedy = 0.0, True
    for end in range(len(row) - n, len(row)):
        log_p_V = model(torch.tensor([row[:end]]))[0, -1].log_softmax(-1)
        total += float(log_p_V[row[end]])
        greedy &= int(log_p_V.argmax()) == row[end]
    return total, greedy


# the reader


@torch.inference_mode()
@pytest.mark.parametrize("name", ["softmax", "gated_deltanet"])
def test_likelihoods_are_sums_over_tokens_whatever_is_read_beside(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runners.reader.TOKENS_AT_ONCE", {"cpu": 60})
    model = make(name)
    pairs = [(encode(text[:at]), encode(text[at:])[1:]) for text in TEXTS for at in (0, 3) if text[at:]]
    pairs = [(context, rest[:24]) for context, rest in pairs]
    found = Reader(model, CPU).likelihood(pairs)
    for (context, rest), (nats, greedy) in zip(pairs, found, strict=True):
        row = (context + rest)[-25:]
        wanted = slow(model, row, len(rest))
        assert nats == pytest.approx(wanted[0], rel=1e-6)
        assert greedy == wanted[1]
    with pytest.raises(UserError, match="25 tokens after 1 does not fit into a window of 24"):
        Reader(model, CPU).likelihood([([BOS], [1] * 25)])


@torch.inference_mode()
def test_greedy_is_what_greedy_decoding_says() -> None:
    model = make()
    reader = Reader(model, CPU)
    said = reader.generate(["one two"], 6)[0]
    assert said
    right, wrong = reader.likelihood([(encode("one two"), encode(said)[1:]), (encode("one two"), encode("one")[1:])])
    assert right[1]
    assert not wrong[1]


@torch.inference_mode()
def test_a_text_is_read_in_windows_each_token_once_and_the_last_window_is_full() -> None:
    model = make("linear")
    for text, found in zip(TEXTS, Reader(model, CPU, 7).rolling(TEXTS), strict=True):
        tokens = encode(text)[1:]
        wanted = slow(model, [BOS, *tokens[:7]], len(tokens[:7]))[0] if tokens else 0.0
        for first in range(7, len(tokens), 7):
            last = min(first + 7, len(tokens))
            wanted += slow(model, tokens[last - 8 : last], last - first)[0]
        assert found == pytest.approx(wanted, rel=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["softmax", "gated_deltanet", "hola"])
def test_continuations_are_those_of_reading_all_again_for_each_token(name: str) -> None:
    model = make(name)
    found = Reader(model, CPU).generate(TEXTS, 9)
    for text, answer in zip(TEXTS, found, strict=True):
        row, said = encode(text)[9 - 24 :], []
        while len(said) < 9:
            token = int(model(torch.tensor([row + said]))[0, -1].argmax())
            if token >= BOS:
                break
            said.append(token)
        assert answer == bytes(said).decode("utf-8", "replace")
    cut = Reader(model, CPU).generate(TEXTS, 9, until=[answer[2:4] for answer in found if len(answer) > 3][:1])
    assert all(whole.startswith(short) for short, whole in zip(cut, found, strict=True))
    with pytest.raises(UserError, match="24 tokens to generate leave no context in a window of 24"):
        Reader(model, CPU).generate(["a"], 24)


def test_rows_are_halved_until_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, sizes = Reader(make("linear"), CPU), []
    score = reader._score

    def tight(rows: Any) -> Any:
        sizes.append(len(rows))
        if len(rows) > 2:
            raise torch.OutOfMemoryError
        return score(rows)

    wanted = reader.rolling(TEXTS)
    monkeypatch.setattr(reader, "_score", tight)
    assert reader.rolling(TEXTS) == pytest.approx(wanted)
    assert max(sizes) > 2


# scores


def test_wikitext_is_parted_at_its_titles_and_read_without_its_tokenisation() -> None:
    text = " \n" + PAGE + " = Second = \n \n End .\n"
    assert wikitext.pages(text) == [PAGE[:-1], " = Second = \n \n End .\n"]
    assert wikitext.as_scored(PAGE) == ' = Stone =\n\nIt is a stone, of 2.5 kg. "Clear" (very).\n\n== Use ==\n\nNone.\n'


@torch.inference_mode()
def test_wikitext_scores_are_of_sums(tmp_path: Path) -> None:
    (tmp_path / "pages.jsonl").write_text("\n".join(json.dumps({"page": page}) for page in (PAGE, "Ärger .")))
    model = make("linear")
    found = tasks.build({"name": "wikitext", "folder": str(tmp_path), "data_files": "pages.jsonl"}).measure(model, CPU)
    nats = -sum(Reader(model, CPU).rolling([wikitext.as_scored(PAGE), "Ärger ."]))
    words = sum(len(re.split(r"\s+", page)) for page in (PAGE, "Ärger ."))
    assert found == {
        "word_perplexity": pytest.approx(math.exp(nats / words)),
        "byte_perplexity": pytest.approx(math.exp(nats / (len(PAGE) + 8))),
        "bits_per_byte": pytest.approx(nats / (len(PAGE) + 8) / math.log(2)),
        "token_perplexity": pytest.approx(math.exp(nats / (len(wikitext.as_scored(PAGE)) + 8))),
        "n": 2,
    }


def test_the_real_wikitext_has_the_words_and_bytes_of_the_harness(real_data: Path) -> None:
    path = real_data / "eval" / "wikitext-2-raw.test.raw"
    pages = [page for (page,) in tasks.build({"name": "wikitext", "data_files": str(path)}).documents()]
    assert len(pages) == 62
    assert sum(len(re.split(r"\s+", page)) for page in pages) == 241335
    assert sum(len(page.encode()) for page in pages) == 1290527


@pytest.mark.parametrize(
    ("passage", "context", "target"),
    [("a b c", "a b", " c"), ("a  b", "a", "  b"), ("a b\nc", "a", " b\nc"), ("a\n b", "a", "\n b")],
)
def test_a_target_is_the_last_word_and_the_space_before_it(passage: str, context: str, target: str) -> None:
    assert lambada.divided(passage) == (context, target)


@torch.inference_mode()
def test_lambada_and_completion_score_what_the_model_says(tmp_path: Path) -> None:
    model = make()
    reader, texts = Reader(model, CPU), ["one two", "three four five", "six seven eight"]
    said = reader.generate(texts, 5)
    passages = [f"{text} word" for text in texts]
    rows = [{"text": f" {text}\n", "value": f"{answer[:3].upper()} "} for text, answer in zip(texts, said, strict=True)]
    rows[2]["value"] = "not that"
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in passages))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = {"folder": str(tmp_path), "data_files": "a.jsonl"}
    found = tasks.build({"name": "lambada", **own}).measure(model, CPU)
    nats = [slow(model, encode(passage)[-25:], 5) for passage in passages]
    assert found["word_perplexity"] == pytest.approx(math.exp(-sum(n for n, _ in nats) / 3), rel=1e-6)
    assert found["accuracy"] == sum(greedy for _, greedy in nats) / 3
    own = {"folder": str(tmp_path), "data_files": "b.jsonl", "answer_len": 5}
    wanted = sum(completion.holds(a.split("\n")[0], r["value"].strip()) for a, r in zip(said, rows, strict=True))
    assert tasks.build({"name": "completion", **own}).measure(model, CPU) == {"contains": wanted / 3, "n": 3}
    assert wanted > 0


def test_capitals_and_signs_of_a_value() -> None:
    assert completion.holds("it is ACME (EU).", "Acme (eu)")
    assert not completion.holds("abc", "a.c")


# documents and what is wrong with them


def test_documents_come_from_lines_tables_and_folders_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import pandas

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"text": f"passage {n} ends", "other": n} for n in range(3)]
    (tmp_path / "set").mkdir()
    lines = "\n\n".join(map(json.dumps, rows))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "set" / "test.jsonl").write_text(lines)
    pandas.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.txt").write_text("passage 0 ends")
    wanted = [(row["text"],) for row in rows]
    for source in ({"data_files": "a.jsonl"}, {"data_files": "a.parquet"}, {"dataset": "set"}):
        settings = {"name": "lambada", "folder": str(tmp_path), "column": "text", "split": "test", **source}
        assert tasks.build(settings).documents() == wanted
        assert tasks.build({**settings, "test_examples": 2}).documents() == wanted[:2]
        assert len(str(documents.fingerprint(settings))) == 16
    assert tasks.build({"name": "lambada", "folder": str(tmp_path), "data_files": "a.txt"}).documents() == wanted[:1]
    with pytest.raises(UserError, match=r"dataset set has no split 'tests'; did you mean 'test'\?"):
        tasks.build({"name": "lambada", "folder": str(tmp_path), "dataset": "set", "split": "tests"}).documents()


GOOD = '{"text": "a b", "value": "b"}\n'
WRONG = {
    "no JSON": ("lambada", GOOD + "{a", {}, r"a\.jsonl, line 2: no JSON: Expecting"),
    "no mapping": ("lambada", "[1]", {}, "line 1: a document is a mapping of columns, not list"),
    "column": ("lambada", GOOD, {"column": "txt"}, "no column 'txt'; did you mean 'text'.*it has text, value"),
    "value column": ("completion", GOOD, {"value_column": "values"}, "no column 'values'; did you mean 'value'"),
    "number": ("completion", '{"text": "a", "value": 3}', {}, "line 1: value is text, not 3"),
    "blank": ("wikitext", "\n \n", {"column": "text"}, r"a\.jsonl holds no document"),
    "empty page": ("wikitext", '{"page": " "}', {}, "document 1: it is empty"),
    "one word": ("lambada", GOOD + '{"text": "word"}', {}, "document 2: it is too short: a word and those before"),
    "no value": ("completion", '{"text": "a", "value": " "}', {}, "document 1: its text or its value is empty"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_documents_is_told_in_one_line(case: str, tmp_path: Path) -> None:
    name, text, settings, told = WRONG[case]
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(UserError, match=told) as caught:
        tasks.build({"name": name, "folder": str(tmp_path), "data_files": "a.jsonl", **settings}).documents()
    assert str(caught.value).startswith(f"task {name}: ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == Exit.ENVIRONMENT


def test_a_text_is_no_table_and_bytes_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    for name, told in (("completion", "a.txt is no table: the columns text, value want .jsonl"), ("lambada", "byte 3")):
        with pytest.raises(UserError, match=told):
            tasks.build({"name": name, "folder": str(tmp_path), "data_files": "a.txt"}).documents()


def test_a_hub_that_does_not_answer_is_waited_for_once_and_not_long(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[str] = []

    def info(_: Any, name: str, timeout: float) -> None:
        asked.append(name)
        if name == "slow/set":
            time.sleep(3)
        if name == "no/set":
            raise ValueError("404: there is no such set\nand so on")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    monkeypatch.setattr(corpus, "HUB_S", 0.2)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    start = time.monotonic()
    for told in ("slow/set: the hub did not answer within 0.2 s", "no/set: ValueError: 404: there is no such set"):
        for _ in range(2):
            with pytest.raises(UserError, match=told):
                corpus.ask_hub({"dataset": told.split(":")[0]})
    with pytest.raises(UserError, match="task lambada: dataset no/set: ValueError"):
        documents.check({"name": "lambada", "dataset": "no/set"})
    corpus.ask_hub({"dataset": "good/set"})
    assert asked == ["slow/set", "no/set", "good/set"]
    assert time.monotonic() - start < 2
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    corpus.ask_hub({"dataset": "other/set"})
    assert len(asked) == 3


# in a spec


def written(tmp_path: Path, more: str, spec: str = SPEC) -> str:
    (tmp_path / "zero.yaml").write_text(spec + more)
    return str(tmp_path / "zero.yaml")


@pytest.mark.parametrize(
    ("more", "line", "told"),
    [
        ("  w: {task: {name: wikitext}}\n", 8, "task needs one of data_files | dataset"),
        ("  w: {task: {name: wikitext, data_files: no.txt}}\n", 8, "there is no file no.txt"),
        (
            "  w: {task: {name: lambada, data_files: $STDLIB/abc.py, seq_len: 1}}\n",
            8,
            "seq_len is None or seq_len >= 2",
        ),
        ("  w: {task: {name: ruler, kind: single_2}}\n", 8, "essay_files is not None or kind in"),
        ("  w: {task: {name: ruler, kind: multi_key1}}\n", 8, "multikey_1"),
        ("  w: {task: {name: lambada, data_files: {required: passages}}}\n", 8, "--set evaluate.w.task.data_files=..."),
        ("  w: {task: {name: lambada, data_files: $STDLIB/abc.py, colum: a}}\n", 8, "did you mean 'column'"),
    ],
)
def test_what_is_wrong_with_an_evaluation_is_told_at_its_place(more: str, line: int, told: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load(written(tmp_path, more), catalog=CATALOG)
    (mark, text), *others = caught.value.problems
    assert (mark.line, others) == (line, [])
    assert told in text


def test_an_evaluation_is_for_models_of_text_and_trains_none(tmp_path: Path) -> None:
    text = "{name: text, data_files: $STDLIB/abc.py, seq_len: 24, valid_examples: 2, test_examples: 4}"
    mqar = SPEC.replace(text, "{name: mqar, vocab_size: 512, seq_len: 32, n_pairs: 2}")
    more = "  w: {task: {name: wikitext, data_files: $STDLIB/abc.py}}\n"
    for spec, told in (
        (mqar, "task wikitext evaluates models of task text, and a trial here trains mqar"),
        (
            SPEC.replace(text, "{name: wikitext, data_files: $STDLIB/abc.py}"),
            "evaluates models of task text and trains none",
        ),
    ):
        with pytest.raises(SpecError) as caught:
            load(written(tmp_path, more, spec), catalog=CATALOG)
        assert told in caught.value.problems[0][1]


def test_from_a_spec_to_scores_and_documents_that_are_wrong_before_any_trial(tmp_path: Path, store: Store) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a b c", "value": "c"}\n')
    own = "data_files: a.jsonl"
    more = f"  w: {{task: {{name: wikitext, {own}, column: text}}}}\n  l: {{task: {{name: lambada, {own}}}}}\n"
    more += f"  c: {{task: {{name: completion, {own}, answer_len: 4, seq_len: [8, 16]}}}}\n"
    plan = load(written(tmp_path, more), catalog=CATALOG)
    assert plan.metrics["word_perplexity"] == "min"
    assert plan.metrics["contains"] == "max"
    (tmp_path / "a.jsonl").write_text('{"txt": "a b c", "value": "c"}\n')
    with pytest.raises(
        UserError, match=r"task wikitext: a\.jsonl, line 1: there is no column 'text'; did you mean 'txt'"
    ):
        driver.launch(plan, store=store.root, executor="inline", say=lambda _: None)
    (tmp_path / "a.jsonl").write_text('{"text": "a b c", "value": "c"}\n')
    assert driver.launch(plan, store=store.root, executor="inline", say=lambda _: None).counts == {"complete": 1}
    (member,) = plan.members
    scores = {part.set + part.label: store.evaluation(member.trial.id, part.id) for part in member.slices}
    assert set(scores) == {"held_out", "w", "l", "cseq_len-8", "cseq_len-16"}
    assert scores["w"]["stamp"]["data"] == documents.fingerprint(member.slices[1].task)
    for found in scores.values():
        assert all(math.isfinite(value) for value in found["metrics"].values())
    assert 100 < scores["w"]["metrics"]["token_perplexity"] < 700, "two updates teach nothing"


def test_an_evaluation_runs_in_the_precision_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a b c d")
    task = {"name": "lambada", "folder": str(tmp_path), "data_files": "a.txt"}
    seen = []
    trained = {"name": "text", "data_files": "-", "seq_len": 24}
    for dtype in ("fp32", "bf16"):
        trial = Trial("t", 3, {"name": "linear"}, trained, {"d_model": 16}, {"dtype": dtype})
        model = models.build(trial)
        model.layers[0].register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
        evaluate.run(model, trial, task, device=CPU)
    assert seen == [False, True]
