"""Every result of the diagnostics prints its summary."""

from jmp_scale import diagnostics

RESULTS = [cls for cls in vars(diagnostics).values() if hasattr(cls, "summary")]


def test_each_result_prints_its_summary():
    assert diagnostics.PrecisionReport in RESULTS
    for cls in RESULTS:
        assert cls.__str__ is cls.__repr__ is cls.summary
