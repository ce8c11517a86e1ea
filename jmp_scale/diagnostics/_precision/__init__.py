"""Reads what half precision does to a program: `precision_report`.

From the top: `report` traces, `walk` goes through the equations with the `rules` of one
operation, the `loops` and the `matrix_work`, `facts` and `origins` say what is known
about a value, and `conclusions` holds the rules of a whole program. A `step` is an
equation in its place, and `source` finds its line.
"""

from .matrix_work import Operation as Operation
from .report import PrecisionReport as PrecisionReport
from .report import precision_report as precision_report
from .step import Finding as Finding
