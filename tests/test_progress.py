"""What a waiting person reads: counts, time gone, a fair guess of the time left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runners import progress
from runners.progress import Display, Pace, Tally, clock

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0s"), (59.4, "59s"), (65, "1:05"), (3599.9, "1:00:00"), (7200, "2:00:00")]
)
def test_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_a_tally_in_words() -> None:
    assert str(Tally(30, 12, 0, {"a": 0.5, "b": 0.5}, 83.0, 0.1)) == (
        "12/30 done · 2 running · 1:23 gone · about 2:50 left"
    )
    assert str(Tally(30, 12, 1, {}, 83.0, None)) == "12/30 done · 0 running · 1 failed · 1:23 gone"
    assert str(Tally(3, 2, 1, {}, 8.0, 1.0)) == "2/3 done · 0 running · 1 failed · 8s gone"


def test_before_the_first_worker() -> None:
    assert str(Tally(3, 0, 0, {}, 8.0)) == "0/3 done · starting · 8s gone"


def test_pace_leaves_the_start_out() -> None:
    pace = Pace()
    assert pace(0, 1.9, 60.0) is None
    assert pace(1, 2.0, 61.0) is None
    assert pace(2, 3.0, 63.0) == pytest.approx(0.5)
    assert pace(9, 10.0, 77.0) == pytest.approx(0.5)


def test_plain_lines_come_now_and_then_and_not_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    said: list[str] = []
    made: list[int] = []

    def tally() -> Tally:
        made.append(1)
        return Tally(4, int(now[0] // 15), 0, {}, 1.0)

    with Display(said.append, live=False) as display:
        for second in range(60):
            now[0] = float(second)
            display.show(tally)
    assert len(made) == 5  # every ten seconds, not at each call
    assert [line.split(" ")[0] for line in said] == ["0/4", "1/4", "2/4", "3/4"]


LIVE = """
from runners.progress import Display, Tally
with Display(print, live=True) as display:
    display.show(lambda: Tally(4, 1, 0, {"lr-0.001 [odd] seed=0": 0.25}, 5.0), now=True)
    print("failed: told above the line")
"""


def test_the_live_line_on_a_terminal() -> None:
    reader, terminal = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    subprocess.run([sys.executable, "-c", LIVE], stdout=terminal, cwd=ROOT, env=environment, check=True)
    os.close(terminal)
    shown = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert "1/4 done · 1 running · 5s gone   lr-0.001 [odd] seed=0 25%" in shown
    assert "failed: told above the line" in shown
    assert shown.index("1/4 done") < shown.index("failed:")
    assert "\x1b[2K" in shown  # the line is wiped, not left behind
