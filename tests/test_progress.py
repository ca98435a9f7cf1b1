"""What a log shows of many short steps, and what a terminal does."""

import io

import pytest

from nvfp4lab.batch import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_all_items_pass_in_order(stream):
    assert list(progress.passing(range(5), "seeds", stream)) == [0, 1, 2, 3, 4]


def test_a_log_gets_plain_lines_at_most_so_often(monkeypatch):
    seconds = iter(range(0, 1000, 4))  # each look at the clock is 4 s after the last
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))
    log = io.StringIO()
    list(progress.passing(range(6), "seeds", log, every_s=10.0))
    assert log.getvalue() == "[3/6] seeds, ETA 12 s\n[6/6] seeds, ETA 0 s\n"


def test_a_short_run_says_nothing_to_a_log_and_draws_on_a_terminal():
    log, terminal = io.StringIO(), Terminal()
    list(progress.passing(range(3), "seeds", log))
    list(progress.passing(range(3), "seeds", terminal))
    assert log.getvalue() == "" and "seeds" in terminal.getvalue()
