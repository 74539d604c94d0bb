"""What a report says in sentences: the answer, what describes it, what to beware of."""

from __future__ import annotations

from collections.abc import Sequence

from dashboards.about import main_metric
from dashboards.cells import Cell, rises_with_load
from dashboards.compare import Comparison, missing_text
from dashboards.figures import LOAD_FIRST, title
from dashboards.labels import Labels, bytes_text, counted, effect_text, listed, nearly, p_text, side
from dashboards.stats import Verdict
from dashboards.table import COMPARED_STAMPS, Results, speaks_of
from runners.schema import Plan, Status

DESCRIBED = 6
"""How many arms the descriptive sentence lists."""
NAMED = 4
"""How many winners the answer names."""


def answer(plan: Plan, results: Results, comparisons: Sequence[Comparison]) -> str:
    """The report's first sentence, from the verdicts alone."""
    done = sum(results.counts().get(status, 0) for status in (Status.COMPLETE, Status.DIVERGED))
    if done == 0:
        return f"No answer yet: none of {len(plan.members)} trials has finished."
    if not comparisons:
        return "This sweep tests nothing (its spec has no `compare`): figures and tables describe, nothing is claimed."
    if len(comparisons) == 1:
        return sentence(comparisons[0])
    groups: dict[Verdict, list[Comparison]] = {verdict: [] for verdict in Verdict}
    for found in comparisons:
        groups[found.verdict].append(found)
    decided = [*groups[Verdict.A_BETTER], *groups[Verdict.B_BETTER]]
    parts = [f"{len(decided)} decided ({_winners(decided)})"] if decided else []
    for verdict, words in _GROUPS.items():
        if groups[verdict]:
            parts.append(f"{len(groups[verdict])} {words}")
    return f"{len(comparisons)} comparisons: {listed(parts)}."


def sentence(found: Comparison) -> str:
    """One comparison as a sentence."""
    test = found.test
    by = f"{effect_text(found)}, {len(found.pairs)} pairs, adjusted p {p_text(found.p_adjusted)}"
    if found.verdict in (Verdict.A_BETTER, Verdict.B_BETTER):
        inside = "; smaller than the margin that matters" if "inside the margin" in found.reason else ""
        return f"{_better(found)} in {test.set} {test.metric}: {by}{inside}."
    if found.verdict == Verdict.NO_DIFFERENCE:
        return (
            f"No difference beyond {test.margin:g} in {test.set} {test.metric} between {side(test.a)} and "
            f"{side(test.b)}: {effect_text(found)}, {len(found.pairs)} pairs."
        )
    if found.verdict == Verdict.MISSING:
        return f"No verdict on {side(test.a)} against {side(test.b)}: {found.reason}."
    few = f"only {found.reason}" if found.verdict == Verdict.TOO_FEW else found.reason
    needs = f" It takes {found.needs}." if found.needs else ""
    return (
        f"Cannot tell whether {side(test.a)} or {side(test.b)} is better in {test.set} {test.metric}: "
        f"{effect_text(found)}; {few}.{needs}"
    )


_GROUPS = {
    Verdict.NO_DIFFERENCE: "without a difference beyond the margin",
    Verdict.CANNOT_TELL: "undecided (cannot tell)",
    Verdict.TOO_FEW: "with too few pairs to tell",
    Verdict.MISSING: "without a verdict, as pairs are missing",
}


def _better(found: Comparison) -> str:
    winner, loser = _places(found)
    return f"{winner} is better than {loser}"


def _places(found: Comparison) -> tuple[str, str]:
    """Winner and loser of a decided comparison."""
    a, b = side(found.test.a), side(found.test.b)
    return (a, b) if found.verdict == Verdict.A_BETTER else (b, a)


def _winners(decided: Sequence[Comparison]) -> str:
    """`x is better than y and z; u is better than v`."""
    beaten: dict[str, list[str]] = {}
    for found in decided:
        winner, loser = _places(found)
        if loser not in beaten.setdefault(winner, []):
            beaten[winner].append(loser)
    parts = [f"{winner} is better than {listed(losers)}" for winner, losers in beaten.items()]
    return "; ".join(parts[:NAMED]) + ("; …" if len(parts) > NAMED else "")


def described(plan: Plan, cells: Sequence[Cell]) -> str:
    """The means at the last task setting, best first: description, without a test."""
    scored = [cell for cell in cells if cell.main.n]
    if not scored:
        return ""
    name, metric = main_metric(plan)
    last = [cell for cell in scored if cell.condition == scored[-1].condition]
    last.sort(key=lambda cell: cell.main.mean, reverse=plan.metrics.get(metric, "max") == "max")
    shown = [f"{c.series} {nearly(c.main.mean)} ({bytes_text(c.state_bytes)})" for c in last[:DESCRIBED]]
    where = f" at {scored[-1].condition}" if scored[-1].condition else ""
    more = f"; and {len(last) - DESCRIBED} more" if len(last) > DESCRIBED else ""
    return f"Described, not tested: mean {title(f'{name}/{metric}')}{where} (bytes of state): {'; '.join(shown)}{more}."


def unfinished(plan: Plan, results: Results) -> str:
    """What a reader must know first if the sweep is not done; empty if it is."""
    counts = results.counts()
    missing = {s: n for s, n in counts.items() if s not in (Status.COMPLETE, Status.DIVERGED)}
    if not missing:
        return ""
    left = sum(missing.values())
    parts = listed(f"{n} {status}" for status, n in missing.items())
    return f"Not finished: {left} of {len(plan.members)} trials have no full result ({parts}). What follows may change."


def notes(
    plan: Plan, results: Results, comparisons: Sequence[Comparison], cells: Sequence[Cell], looks: int
) -> list[str]:
    """What to beware of: diverged and failed trials, missing pairs, looks, stamps that differ, odd orders."""
    out = []
    counts = results.counts()
    if n := counts.get(Status.DIVERGED, 0):
        out.append(f"{n} of {len(plan.members)} trials diverged: {_diverged(plan, results, n)}")
    if n := counts.get(Status.FAILED, 0):
        out.append(f"{n} of {len(plan.members)} trials failed: their pairs count as missing")
    for found in comparisons:
        out += [f"{side(found.test.name)}: {text}" for text in _beware(found)]
    if looks > 1:
        out.append(f"this sweep was looked at {looks} times while seeds were added: every p value is multiplied by it")
    if any(search.is_same for search in plan.searches):
        out.append("winners were selected on the seeds shown here: their scores are biased upwards")
    for name in stamps_that_differ(plan, results):
        out.append(f"trials differ in {name}: see provenance")
    out += rises_with_load(cells, condition_loads(plan), plan.metrics.get(main_metric(plan)[1], "max"))
    return [*out, *plan.notes, *results.warnings]


def _diverged(plan: Plan, results: Results, n: int) -> str:
    """What `n` diverged trials count as; without a known chance level they have no score at all."""
    rows, main = results.members, "/".join(main_metric(plan))
    gone = rows[rows["status"] == Status.DIVERGED]
    unknown = n if main not in gone else int(gone[main].isna().sum())
    if unknown == 0:
        return "they score chance, and count in every mean"
    some = "" if unknown == n else f"{n - unknown} score chance; "
    return f"{some}{unknown} on tasks without a known chance level of {title(main)}, so out of every mean"


def _beware(found: Comparison) -> list[str]:
    out = []
    if found.n_missing:
        of = counted(len(found.pairs) + found.n_missing, "pair")
        out.append(f"{found.n_missing} of {of} missing ({missing_text(found.scored)})")
    if found.pairs and (lost := [block for block in found.scored.blocks if block not in found.blocks]):
        out.append(f"no pair at {'; '.join(lost)}: the mean is over the other blocks")
    if n := found.scored.n_outside:
        out.append(f"{counted(n, 'trial')} of a left out: of a size outside b's")
    if found.n_diverged:
        out.append(f"{counted(found.n_diverged, 'diverged trial')} in its pairs, scored at chance")
    if found.test.unpaired_a or found.test.unpaired_b:
        out.append(f"{counted(found.test.unpaired_a, 'trial')} of a and {found.test.unpaired_b} of b without a partner")
    if found.tuning.a != found.tuning.b or len(found.tuning.a) > 1:
        out.append(f"the sides were not tuned alike: {found.tuning.words()}")
    if found.n_stamps_differ:
        out.append(f"{counted(found.n_stamps_differ, 'pair')} run under different code, versions or devices")
    return out


def condition_loads(plan: Plan) -> dict[str, float]:
    """The load of each condition: its pairs, else its length. Empty where neither varies."""
    labels = Labels(plan)
    for name in LOAD_FIRST:
        loads = {labels.condition(m): m.trial.task[name] for m in plan.members if name in m.trial.task}
        if len(set(loads.values())) > 1:
            return loads
    return {}


def stamps_that_differ(plan: Plan, results: Results) -> dict[str, dict[str, int]]:
    """Stamp fields with more than one value, and how many trials have which.

    Each is compared among the trials it speaks of.
    """
    counts: dict[str, dict[str, int]] = {}
    for trial in {member.trial.id: member.trial for member in plan.members}.values():
        stamp = results.stamps.get(trial.id, {})
        for name in COMPARED_STAMPS if stamp else ():
            of = speaks_of(name, trial)
            field = f"{name} of {of}" if of else name
            value = str(stamp.get(name))
            counts.setdefault(field, {})[value] = counts.get(field, {}).get(value, 0) + 1
    for value in results.shared_code({member.trial.id for member in plan.members}).values():
        counts.setdefault("code that all share", {})[value] = counts.get("code that all share", {}).get(value, 0) + 1
    return {field: values for field, values in counts.items() if len(values) > 1}
