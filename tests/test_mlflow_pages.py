"""What makes MLflow's pages useful: names it takes, data sets, system metrics, notes, verdicts, the queries told."""

import json
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_store import fill, make_plan, without
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlflow.utils.validation import _validate_metric_name, _validate_param_name
from stores import make

from dashboards import table, words
from dashboards.compare import Comparison, compare
from dashboards.outcome import outcome
from runners import driver, record, summary_run, usage
from runners.names import cut, from_mlflow, to_mlflow
from runners.run_state import NOTE
from runners.schema import Plan
from runners.store import Store, read_sealed, seal, write_json

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "dashboards" / "MLFLOW.md"


# names


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=300))
@example("length/accuracy/seq_len-1024/n_pairs-64")
@example("test/acc@5 [x]=1")
@example("..")
@example("/a//b/./c/")
@example("a:40:b")
@example("")
def test_every_name_is_taken_and_comes_back(name: str) -> None:
    told = to_mlflow(name)
    _validate_metric_name(told)
    _validate_param_name(told)
    assert len(told) <= 250
    assert from_mlflow(told, cut({name: 1})) == name


def test_usual_names_stay_as_they_are() -> None:
    for name in ("length/accuracy/seq_len-1024/n_pairs-64", "train/loss", "mechanism.admission", "state_bytes"):
        assert to_mlflow(name) == name
    assert to_mlflow("test/acc@5") == "test/acc:40:5"


# system metrics


def test_a_worker_samples_itself_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "EVERY_S", 0.02)
    attempt = tmp_path / "attempts" / "1"
    attempt.mkdir(parents=True)
    with usage.sampling(attempt, SimpleNamespace(type="cpu")):
        time.sleep(0.5)
    ((second, moment, metrics),) = usage.read(tmp_path)
    assert (second, round(time.time() - moment)) in ((0, 0), (0, 1))
    assert metrics.keys() == {
        "system/cpu_utilization_percentage",
        "system/system_memory_usage_megabytes",
        "system/system_memory_usage_percentage",
        "system/process_cpu_utilization_percentage",
        "system/process_memory_usage_megabytes",
    }
    assert 0 < metrics["system/process_memory_usage_megabytes"] < metrics["system/system_memory_usage_megabytes"]


def test_a_card_tells_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that refuses to tell its power, as slices of cards do."""
    nvml = pytest.importorskip("pynvml")

    def refuse(_: Any) -> int:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", lambda _: SimpleNamespace(used=3e9, total=6e9))
    monkeypatch.setattr(nvml, "nvmlDeviceGetUtilizationRates", lambda _: SimpleNamespace(gpu=71))
    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", refuse)
    told = usage._card_usage(object())
    assert told == {
        "gpu_0_memory_usage_megabytes": 3000.0,
        "gpu_0_memory_usage_percentage": 50.0,
        "gpu_0_utilization_percentage": 71.0,
    }


@pytest.mark.gpu
def test_a_real_card_tells_its_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(usage, "EVERY_S", 0.05)
    attempt = tmp_path / "attempts" / "1"
    attempt.mkdir(parents=True)
    held = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    with usage.sampling(attempt, torch.device("cuda")):
        time.sleep(1.5)
    metrics = usage.read(tmp_path)[0][2]
    assert metrics["system/gpu_0_memory_usage_megabytes"] * 1e6 > held.nbytes
    assert 0 <= metrics["system/gpu_0_utilization_percentage"] <= 100


def samples(folder: Path, attempt: int, *moments: float) -> None:
    path = folder / "attempts" / str(attempt) / usage.FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        json.dumps({"time": 1000 + moment, "metrics": {"cpu_utilization_percentage": moment}}) for moment in moments
    ]
    path.write_text("\n".join([*rows, '{"time": 5, "met']) + "\n")


def test_samples_of_all_attempts_are_one_curve(tmp_path: Path) -> None:
    samples(tmp_path, 1, 0.5, 3.5, 3.9)
    samples(tmp_path, 10, 60.5)
    samples(tmp_path, 2, 20.5)
    assert [second for second, _, _ in usage.read(tmp_path)] == [0, 3, 20, 60], "torn lines and doubles are left out"
    (tmp_path / "attempts" / "2" / "aside").mkdir()  # it began anew
    assert [second for second, _, _ in usage.read(tmp_path)] == [0, 40]


# what a run and the summary say


class Sent:
    """A store whose sweep has been sent, with its report."""

    def __init__(self, root: Path) -> None:
        made = make(root)
        self.plan: Plan = without(make_plan(1, grid=(4, 8)), question="Which admission keeps more?")
        self.store: Store = fill(made.root, self.plan, skip=1)
        samples(self.store.trial_folder(self.plan.members[0].trial.id), 1, 0.0, 2.0, 4.0)
        odd = (
            self.store.trial_folder(self.plan.members[1].trial.id)
            / "evals"
            / f"{self.plan.members[1].slices[0].id}.json"
        )
        row = read_sealed(odd)
        assert row is not None
        write_json(odd, seal({**row, "metrics": {"accuracy": 0.5, "loss": 1e308, "acc@5": 0.75}}), durable=False)
        self.folder = self.store.revision_folder("capacity", 1) / "report"
        self.comparisons, self.answer = self._report()
        self.sent = driver.sync(self.store.root, say=lambda _: None)
        self.client = record.make_client(self.store.mlflow_uri)
        self.experiment = self.client.get_experiment_by_name("capacity")

    def _report(self) -> tuple[list[Comparison], str]:
        """A report without its figures, which take seconds."""
        results = table.load(self.plan, self.store.root)
        found = compare(self.plan, results)
        answer = words.answer(self.plan, results, found)
        self.folder.mkdir()
        (self.folder / "report.html").write_text("<p>The report.")
        told = outcome(self.plan, "0001", answer, results.counts(), found, ["one trial is missing"])
        (self.folder / summary_run.OUTCOME_FILE).write_text(told)
        return found, answer

    def search(self, query: str, **options: Any) -> list[Any]:
        return list(self.client.search_runs([self.experiment.experiment_id], query, **options))


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Sent:
    return Sent(tmp_path_factory.mktemp("sent") / "runs")


def test_a_run_tells_its_data_sets_and_its_machine(sent: Sent) -> None:
    (run,) = sent.search(f"tags.`memsweep.trial_id` = '{sent.plan.members[0].trial.id}'")
    told = {(one.dataset.name, one.tags[0].value) for one in run.inputs.dataset_inputs}
    assert told == {("mqar", "training"), ("mqar test", "evaluation")} | {
        (f"mqar load n_pairs-{n}", "evaluation") for n in (4, 8)
    }
    training = next(one.dataset for one in run.inputs.dataset_inputs if one.dataset.name == "mqar")
    assert json.loads(training.profile)["n_pairs"] == 4
    history = sent.client.get_metric_history(run.info.run_id, "system/cpu_utilization_percentage")
    assert [(point.step, point.value) for point in history] == [(0, 0.0), (2, 2.0), (4, 4.0)]
    assert run.data.tags[NOTE].startswith(f"Trial `{sent.plan.members[0].trial.id}`")
    assert all(run.data.tags.values()), "no empty words on its page"


def test_odd_names_and_numbers_are_told_without_harm(sent: Sent) -> None:
    (run,) = sent.search(f"tags.`memsweep.trial_id` = '{sent.plan.members[1].trial.id}'")
    assert run.data.metrics["test/acc:40:5"] == 0.75
    assert "test/acc@5" in {from_mlflow(name, run.data.tags) for name in run.data.metrics}
    assert all(map(math.isfinite, run.data.metrics.values()))


def test_the_summary_says_question_answer_and_verdicts(sent: Sent) -> None:
    (summary,) = sent.search("tags.`memsweep.kind` = 'summary'")
    note, tags = summary.data.tags[NOTE], summary.data.tags
    assert "**Which admission keeps more?**" in note
    assert sent.answer in note
    assert note.count("\n| admission residual") == 2
    assert tags["memsweep.answer"] == sent.answer
    assert tags["memsweep.verdict.2"].startswith("admission residual vs admission recency (load): ")
    assert summary.data.metrics["verdict/trials complete"] == 7
    effect = sent.comparisons[0].effect
    name = to_mlflow("verdict/admission residual vs admission recency (test) effect")
    assert summary.data.metrics[name] == pytest.approx(effect)
    assert sent.experiment.tags[NOTE] == f"Which admission keeps more?\n\n{sent.answer}"
    files = {path.path for path in sent.client.list_artifacts(summary.info.run_id, "report")}
    assert {"report/report.html", "report/report.json"} <= files
    spec = {path.path for path in sent.client.list_artifacts(summary.info.run_id, "spec")}
    assert spec == {"spec/spec.yaml", "spec/resolved.json"}


def test_sync_sends_a_newer_report_and_nothing_twice(sent: Sent) -> None:
    (summary,) = sent.search("tags.`memsweep.kind` = 'summary'")
    assert sent.sent == {"capacity": 7}
    assert driver.sync(sent.store.root) == {"capacity": 0}
    (run,) = sent.search(f"tags.`memsweep.trial_id` = '{sent.plan.members[0].trial.id}'")
    sent.client.set_tag(run.info.run_id, record.MARK, "200:older")
    assert driver.sync(sent.store.root) == {"capacity": 1}
    (again,) = sent.search(f"tags.`memsweep.trial_id` = '{sent.plan.members[0].trial.id}'")
    assert len(again.inputs.dataset_inputs) == len(run.inputs.dataset_inputs)
    assert len(sent.client.get_metric_history(run.info.run_id, "system/cpu_utilization_percentage")) == 3
    outcome = sent.folder / summary_run.OUTCOME_FILE
    kept = outcome.read_text()
    outcome.write_text(kept.replace(sent.answer, "Another answer."))
    with open(sent.folder / "report.html", "a") as file:
        file.write("<!-- newer -->")
    driver.sync(sent.store.root)
    (newer,) = sent.search("tags.`memsweep.kind` = 'summary'")
    assert newer.info.run_id == summary.info.run_id
    assert newer.data.tags["memsweep.answer"] == "Another answer."
    outcome.write_text(kept)
    assert summary_run.log_report(sent.store, sent.plan, 1, sent.folder) is None


def test_the_queries_told_find_what_they_say(sent: Sent) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    queries = re.findall(r"^\| `((?:metrics|params|tags|attributes|dataset).*?)` \|", text.replace("``", "`"), re.M)
    assert len(queries) >= 8
    found = {query: len(sent.search(query)) for query in queries}
    assert found["tags.`memsweep.kind` = 'summary'"] == 1
    assert found["tags.`memsweep.kind` = 'trial'"] == 7
    never = {query for query, n in found.items() if n == 0}
    assert all("failed" in query or "diverged" in query for query in never), never
