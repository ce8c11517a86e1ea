"""Reports on a run and its loss scale, which read and never change anything.

`docs/monitor.md` says which one answers which question.
"""

from .._public import name_module as _name_module
from ._findings import Finding as Finding
from ._precision.comparison import GradientComparison as GradientComparison
from ._precision.comparison import LeafComparison as LeafComparison
from ._precision.comparison import Window as Window
from ._precision.comparison import compare_gradients as compare_gradients
from ._precision.report import Operation as Operation
from ._precision.report import PrecisionReport as PrecisionReport
from ._precision.report import precision_report as precision_report
from ._precision.sensitivity import SensitiveProduct as SensitiveProduct
from ._precision.sensitivity import SensitiveProducts as SensitiveProducts
from ._precision.sensitivity import sensitive_products as sensitive_products
from ._run.check_step import StepCheck as StepCheck
from ._run.check_step import check_step as check_step
from ._run.diagnosis import Diagnosis as Diagnosis
from ._run.diagnosis import diagnose_nonfinite as diagnose_nonfinite
from ._run.health import HealthLog as HealthLog
from ._run.history import LossScaleHistory as LossScaleHistory
from ._run.metrics import metrics as metrics
from ._speed import SpeedComparison as SpeedComparison
from ._speed import compare_speed as compare_speed

_name_module(globals())
