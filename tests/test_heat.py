"""The map of scores by depth and length: its cells, its panels, and when there is none."""

from __future__ import annotations

from itertools import product

import pandas as pd
import pytest

from dashboards import style
from dashboards.heat import heat, is_map


def scores(models: int = 2) -> pd.DataFrame:
    """Seed 0 is worst and seed 2 best: a cell's median is seed 1's."""
    rows = [
        {"series": f"m{m}", "condition": "", "seed": seed, "eval.depth": depth, "eval.seq_len": length,
         "value": m / 10 + depth / 2 + length / 1000 + 0.01 * (seed - 1)}
        for m, seed, depth, length in product(range(models), range(3), (0.0, 0.5, 1.0), (32, 64))
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_a_cell_is_the_median_over_seeds() -> None:
    figure = heat(scores(), "map exact", [0, 1], " Sweep x.")
    assert figure is not None
    spec = figure.spec
    (cells,) = spec["datasets"].values()
    assert len(cells) == 2 * 3 * 2
    for cell in cells:
        expected = int(cell["panel"][1]) / 10 + cell["depth"] / 2 + cell["length"] / 1000
        assert cell["value"] == pytest.approx(expected)
    assert spec["facet"]["sort"] == ["m0", "m1"]
    assert spec["spec"]["layer"][0]["encoding"]["color"]["scale"]["domain"] == [0, 1]
    assert "m0 0.298; m1 0.398" in figure.description
    assert figure.caption.endswith("Sweep x.")
    assert style.svg(figure).count(">0.03<") == 1  # depth 0, length 32 of m0


def test_models_that_trained_elsewhere_have_their_own_panels() -> None:
    data = pd.concat([scores(1), scores(1).assign(condition="haystack random")])
    figure = heat(data, "map exact", None, "")
    assert figure is not None
    assert figure.spec["facet"]["sort"] == ["m0", "m0, haystack random"]


def test_no_map_without_depths_and_lengths_or_of_too_many_models() -> None:
    data = scores()
    assert is_map(data)
    assert not is_map(data[data["eval.depth"] == 0])
    assert not is_map(data.drop(columns="eval.depth"))
    assert heat(scores(25), "map exact", [0, 1], "") is None
