"""How a finding is made from a row of a table, how it reads, and who prints it."""

from jmp_scale import diagnostics
from jmp_scale.diagnostics._findings import Rule, are_notes, finding, summary_of

RULES = {
    "lost": Rule("{level}", "{count:,} entries are lost.", "Keep {dtype}: {{}}."),
    "slow": Rule("note", "It takes longer.", ""),
}
VALUES = {"level": "error", "count": 4096, "dtype": "float32"}
LOST, SLOW = finding(RULES, "lost", "a.py:3", **VALUES), finding(RULES, "slow")


def test_a_finding_is_a_row_with_its_values_in_one_line_and_the_cure_on_the_next():
    expected = "error [lost] a.py:3: 4,096 entries are lost.\n  Keep float32: {}."
    assert str(LOST) == expected
    assert str(SLOW) == "note [slow] It takes longer."
    text = ("lost", "error", "a.py:3", "4,096 entries are lost.", "Keep float32: {}.")
    assert tuple(LOST) == text


def test_a_summary_says_that_all_is_fine_where_there_are_only_notes():
    assert are_notes([])
    assert are_notes([SLOW])
    assert not are_notes([SLOW, LOST])
    assert summary_of("Fine.", [], "3 calls.") == "Fine.\n3 calls."
    assert summary_of("Fine.", [SLOW]) == f"Fine.\n{SLOW}"
    assert summary_of("Fine.", [LOST, SLOW]) == f"{LOST}\n{SLOW}\n1 error, 1 note"


def test_each_result_prints_its_summary():
    results = [cls for cls in vars(diagnostics).values() if hasattr(cls, "summary")]
    assert diagnostics.PrecisionReport in results
    for cls in results:
        assert cls.__str__ is cls.__repr__ is cls.summary
