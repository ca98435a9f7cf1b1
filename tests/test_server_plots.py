"""The pictures of stage 3 show what the records say."""

import dataclasses
import io

import pytest

from nvfp4lab import stack
from nvfp4lab.records import Evidence, Verdict, WrongKind
from nvfp4lab.report.style import VERDICT_COLOURS
from nvfp4lab.server import plots


def record(name: str, verdict: Verdict, reason: str = "", kind=None, timeline=()) -> Evidence:
    details = {"timeline": [list(item) for item in timeline]}
    return Evidence("server", f"arm:{name}", stack.here(), stack.capture(), verdict, "repro", reason, kind, details=details)


LIFE = [("importing", 0.0), ("loading", 30.0), ("warming", 36.0), ("ready", 40.0), ("stopped", 55.0)]
ROWS = [
    record(
        "good", Verdict.OK, timeline=[("importing", 0.0), ("loading", 30.0), ("warming", 36.0), ("ready", 40.0), ("stopped", 55.0)]
    ),
    record("bad", Verdict.WRONG, "nan everywhere", WrongKind.NAN, [("importing", 0.0), ("compiling", 20.0), ("ready", 100.0)]),
    record("refused", Verdict.NOT_RUN, "reading the source proves that it raises"),
]


def test_starts_draws_every_phase_to_scale_and_every_verdict():
    axes = plots.starts(ROWS).axes[0]
    widths = [round(bar.get_width(), 3) for bar in axes.patches]
    assert widths == [30.0, 6.0, 4.0, 20.0, 80.0]
    assert [line.get_color() for line in axes.lines] == [VERDICT_COLOURS[row.verdict] for row in ROWS]
    told = [text.get_text().replace("\n", " ") for text in axes.texts]
    assert {"ok", "wrong (nan)", "not_run", "nan everywhere", "reading the source proves that it raises"} <= set(told)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["good", "bad", "refused"]


def test_times_of_a_busy_machine_say_so():
    assert plots.starts(ROWS).axes[0].get_xlabel() == "seconds after the start"
    beside = dataclasses.replace(ROWS[0], details=ROWS[0].details | {"side_by_side": ["bad", "refused"]})
    assert plots.starts([beside]).axes[0].get_xlabel() == "seconds after the start, 3 servers started at once"


def test_no_two_arms_look_alike():
    made = plots.token_kl({f"arm-{n}": [0.1 * (n + 1)] for n in range(12)}, {}, "reference")
    looks = [(line.get_color(), line.get_linestyle()) for line in made.axes[0].lines]
    assert len(set(looks)) == len(looks) == 12


def test_a_long_reason_is_wrapped_below_its_bar_and_no_word_touches_its_marker():
    long = "the server ended before it was ready: ValueError: Current platform does not support this quantization. " * 2
    rows = [record(f"arm-{n}", Verdict.UNSUPPORTED, long, timeline=LIFE) for n in range(4)] + ROWS
    made = plots.starts(rows)
    made.savefig(io.BytesIO())  # lays out
    (axes,) = made.axes
    boxes = {text: text.get_window_extent() for text in axes.texts}
    words = [box for text, box in boxes.items() if text.get_text().partition(" ")[0] in set(Verdict)]
    markers = [line.get_window_extent().padded(line.get_markersize() / 2 * made.dpi / 72) for line in axes.lines]
    assert len(words) == len(markers) == len(rows)
    assert all(word.x0 > marker.x1 for word, marker in zip(words, markers, strict=True))
    texts = list(boxes.values())
    assert not [(one, other) for n, one in enumerate(texts) for other in texts[n + 1 :] if one.overlaps(other)]
    assert all(box.x0 >= 0 and box.x1 <= made.bbox.x1 for box in texts)
    assert sum("platform" in text.get_text() for text in boxes) == 4


def test_token_kl_shows_the_mean_and_the_perfect_kernel_dashed_in_the_arms_colour():
    made = plots.token_kl({"a": [0.1, 0.3], "b": [0.5]}, {"a": [0.2, 0.2]}, "reference")
    solid, dashed, other = made.axes[0].lines[:3]
    assert solid.get_color() == dashed.get_color() != other.get_color()
    assert dashed.get_linestyle() == "--"
    assert "a: mean 0.2 nats over 2 tokens" in solid.get_label()
    assert "a: mean 0.2 nats" in made.alt


@pytest.mark.parametrize("rows", [[], ROWS[2:]])
def test_pictures_of_nothing_can_be_drawn(rows):
    for made in (plots.starts(rows), plots.token_kl({}, {}, "reference")):
        made.savefig(io.BytesIO())
