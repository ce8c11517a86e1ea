"""Reads what half precision does to a program: `precision_report`.

`report` traces. `walk` goes through the equations with the `rules` of one operation,
the `loops` and the `matrix_work`. `conclusions` has the rules of a whole program.
`facts` and `origins` are about values, a `step` is an equation, `source` has its line.
"""

from .matrix_work import Operation as Operation
from .report import PrecisionReport as PrecisionReport
from .report import precision_report as precision_report
from .step import Finding as Finding
