"""Our evaluations against lm-evaluation-harness, on one trained checkpoint and the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from runners import checkpoints, evaluate, tasks, train
from runners.reader import BOS, Reader
from runners.schema import Trial, UserError
from runners.store import Store, write_json
from runners.tasks import wikitext

lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (memsweep[eval])")

from lm_eval import evaluator  # noqa: E402
from lm_eval.api.task import ConfigurableTask  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from lm_eval.tasks._yaml_loader import load_yaml  # noqa: E402
from lm_eval.tasks.fda.task import FDA  # noqa: E402
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # noqa: E402

from runners.harness import TrialModel  # noqa: E402

CPU = torch.device("cpu")
HOME = Path(__file__).resolve().parent.parent
TEXT = HOME / "sweeps" / "specs" / "coriolanus.txt"
STEPS = 80


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trial]:
    """A store that holds one model of Coriolanus."""
    store = Store.create(tmp_path_factory.mktemp("runs"))
    task = {"name": "text", "data_files": str(TEXT), "seq_len": 64, "valid_examples": 2}
    settings = {"steps": STEPS, "batch_size": 8, "lr": 1e-2}
    trial = Trial("0123456789abcdef", 0, {"name": "gated_deltanet"}, task, {"d_model": 32, "n_layers": 2}, settings)
    nothing: dict[str, Any] = {"commit": lambda *_: None, "progress": lambda *_: None, "should_stop": lambda: False}
    fit = train.fit(trial, device=CPU, start=None, checkpoint_every_s=1e9, **nothing)
    folder = store.trial_folder(trial.id)
    write_json(folder / "settings.json", trial.settings())
    kept = checkpoints.Checkpoint(STEPS, fit.snapshot.tensors, fit.snapshot.meta, 0.0, ())
    checkpoints.save(folder / "checkpoints", checkpoints.FINAL, kept)
    return store.root, trial


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Documents in the shape of each task, made of the end of the text, which no training row holds."""
    folder = tmp_path_factory.mktemp("documents")
    scenes = [" ".join(part.split()) for part in TEXT.read_text()[-30000:].split("\n\n")]
    speeches = [scene for scene in scenes if len(scene) > 60]
    rows: dict[str, list[dict[str, str]]] = {
        "wikitext": [{"page": f" = Act {n} = \n \n {s} , 's ( a ) . \n é"} for n, s in enumerate(speeches[:12])],
        "lambada": [{"text": f"{s} "[:150].rsplit(" ", 1)[0]} for s in speeches[:40]] + [{"text": "a  b\nthe"}],
        "completion": [{"text": f" {s[:n]}\n", "value": v} for s in speeches[:15] for n, v in ((40, "e"), (55, "Q~"))],
    }
    paths = {name: folder / f"{name}.jsonl" for name in rows}
    for name, path in paths.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    return paths


def harness(model: Any, name: str, path: Path) -> dict[str, float]:
    """The harness's own scores of one of its tasks, on a file of ours in the place of its data set."""
    folder = Path(lm_eval.__file__).parent / "tasks"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    config = load_yaml(folder / name) if name.endswith(".yaml") else {}

    class Local(ConfigurableTask if config else FDA):  # type: ignore[misc]
        def download(self, *_: Any, **__: Any) -> None:
            self.dataset = dict.fromkeys(("train", "validation", "test"), datasets.Dataset.from_list(rows))

    task = Local(config={key: value for key, value in config.items() if key != "tag"})
    nothing = TaskManager(include_defaults=False)
    found = evaluator.simple_evaluate(model, tasks=[task], task_manager=nothing, bootstrap_iters=0, log_samples=False)
    assert found is not None
    (scores,) = found["results"].values()
    return {key.partition(",")[0]: value for key, value in scores.items() if not isinstance(value, str)}


@pytest.mark.parametrize(
    ("name", "theirs", "names"),
    [
        ("wikitext", "wikitext/wikitext.yaml", {n: n for n in ("word_perplexity", "byte_perplexity", "bits_per_byte")}),
        ("lambada", "lambada/lambada_openai.yaml", {"accuracy": "acc", "word_perplexity": "perplexity"}),
        ("completion", "fda", {"contains": "contains"}),
    ],
)
def test_scores_are_those_of_the_harness(
    name: str, theirs: str, names: dict[str, str], trained: tuple[Path, Trial], files: dict[str, Path]
) -> None:
    root, trial = trained
    model = TrialModel(str(root), trial.id[:6], device="cpu")
    scores = harness(model, theirs, files[name])
    task = {"name": name, "data_files": str(files[name])}
    ours = evaluate.run(model._reader.model, trial, task, device=CPU)
    for own, other in names.items():
        print(f"{name} {own}: ours {ours[own]:.8g}, harness {scores[other]:.8g}")
        assert ours[own] == pytest.approx(scores[other], rel=1e-4, abs=1e-12)
    assert ours["n"] == len(tasks.build(task).documents())
    if "contains" in names:
        assert 0 < ours["contains"] < 1


@pytest.mark.parametrize("length", [1, 5, 7, 8, 20, 21, 23])
def test_windows_are_those_of_the_harness(length: int, trained: tuple[Path, Trial]) -> None:
    reader = Reader(TrialModel(str(trained[0]), trained[1].id, device="cpu")._reader.model, CPU, 7)
    tokens = list(range(length))
    wanted = [make_disjoint_window(pair) for pair in get_rolling_token_windows(tokens, BOS, 7, 1)]
    assert list(reader._windows(tokens)) == wanted


def test_documents_are_detokenised_as_by_the_harness(files: dict[str, Path]) -> None:
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    odd = " a 's ' b ' \" c \" ( d ) [ e ] { f } 1 @,@ 2 @-@ 3 ; 4 : 5 ! 6 ? = = = = N ° x \n y 's '"
    pages = [json.loads(line)["page"] for line in files["wikitext"].read_text().splitlines()]
    for page in [*pages, odd, TEXT.read_text()]:
        assert wikitext.as_scored(page) == wikitext_detokenizer({"page": page})


def test_what_cannot_be_loaded_is_told(trained: tuple[Path, Trial]) -> None:
    root, trial = trained
    for wrong in ("", "f"):
        with pytest.raises(UserError, match="0 trials of the store"):
            TrialModel(str(root), wrong)
    model = TrialModel(str(root), trial.id, device="cpu")
    with pytest.raises(UserError, match="generation is greedy here"):
        model.generate_until([type("Request", (), {"args": ("a", {"do_sample": True})})()])
