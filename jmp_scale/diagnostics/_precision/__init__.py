"""Reads what half precision does to a program: `precision_report`.

From the top: `report` is the public function, `program` traces, `walk` goes through the
equations with the `rules` of one operation and the `loops`, `facts` and `transfer` say
what is known about a value, and `conclusions` holds the rules of a whole program.
`source` and `matrix_work` read what JAX gives.
"""

from .matrix_work import Operation as Operation
from .report import Finding as Finding
from .report import PrecisionReport as PrecisionReport
from .report import precision_report as precision_report
