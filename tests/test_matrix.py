"""What `make matrix` makes of pytest's reports, and how it writes them into a table."""

from pathlib import Path

from noxfile import TABLE, VERSIONS, read_report, with_row

REPORT = """<testsuites><testsuite>
<testcase name="test_a"/>
<testcase name="test_b[2]"><failure message="assert 1 == 2">...</failure></testcase>
<testcase name="test_b[4]"><error message="failed on setup">...</error></testcase>
<testcase name="test_c"><skipped type="pytest.skip" message="this torch has no c">...</skipped></testcase>
<testcase name="test_d"><skipped type="pytest.skip" message="this torch has no c">...</skipped></testcase>
<testcase name="test_e"><skipped type="pytest.skip" message="nccl needs a GPU">...</skipped></testcase>
</testsuite></testsuites>"""

HEAD = "# Title\n\nWords.\n\n| torch | tests |\n|---|---|\n"


def test_a_report_is_counted_and_failures_and_limits_of_torch_are_named_once() -> None:
    assert read_report(REPORT) == ("2 failed, 1 passed, 3 skipped", "this torch has no c; `test_b` fails")


def test_a_row_replaces_that_of_its_version_and_leaves_the_others() -> None:
    text = HEAD + "| 2.3 | good |\n| 2.10 | good |\n\nMore words.\n"
    text = with_row(text, "2.10", ["bad | worse"])
    text = with_row(text, "2.9", ["good"])
    assert text == HEAD + "| 2.3 | good |\n| 2.9 | good |\n| 2.10 | bad \\| worse |\n\nMore words.\n"


def test_rows_begin_a_table_that_has_none() -> None:
    assert with_row(HEAD, "2.3", ["good"]) == HEAD + "| 2.3 | good |\n"


def test_the_floor_of_the_package_is_the_first_version_that_is_tried() -> None:
    assert f'"torch>={VERSIONS[0]}",' in (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert TABLE.exists()
