"""What is seen of something that takes long."""

import pytest

from mgwfbp.cli import progress
from mgwfbp.cli.progress import progress_bar, show_progress


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)


@pytest.mark.usefixtures("talkative")
def test_without_a_terminal_lines_say_how_far_it_is_and_how_long_it_takes(capfd: pytest.CaptureFixture[str]) -> None:
    assert list(show_progress(iter("abcd"), 4, "counting")) == list("abcd")
    lines = capfd.readouterr().err.splitlines()
    assert [line.partition(",")[0] for line in lines] == [f"counting: {part} % done" for part in (25, 50, 75)]
    assert all(line.endswith(" s left") for line in lines)


def test_what_is_quick_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    list(show_progress(iter("abcd"), 4, "counting"))
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("talkative")
def test_what_another_rank_shows_is_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with progress_bar("steps", 10, shown=False) as advance:
        advance(5)
    assert capfd.readouterr().err == ""
