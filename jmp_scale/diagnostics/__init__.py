"""What the loss scale is doing, and why: reports that read and never change anything.

Which one answers which question is in `docs/monitor.md`.
"""

from ._calibration import Calibration as Calibration
from ._calibration import calibrate_loss_scale as calibrate_loss_scale
from ._comparison import GradientComparison as GradientComparison
from ._comparison import LeafComparison as LeafComparison
from ._comparison import compare_gradients as compare_gradients
from ._diagnosis import Diagnosis as Diagnosis
from ._diagnosis import diagnose_nonfinite as diagnose_nonfinite
from ._health import HealthLog as HealthLog
from ._health import health as health
from ._histogram import ExponentHistogram as ExponentHistogram
from ._histogram import exponent_histogram as exponent_histogram
from ._history import HistorySummary as HistorySummary
from ._history import LossScaleHistory as LossScaleHistory
from ._metrics import metrics as metrics
from ._precision import Finding as Finding
from ._precision import Operation as Operation
from ._precision import PrecisionReport as PrecisionReport
from ._precision import precision_report as precision_report
from ._report import GradReport as GradReport
from ._report import grad_report as grad_report
from ._sensitivity import SensitiveProduct as SensitiveProduct
from ._sensitivity import SensitiveProducts as SensitiveProducts
from ._sensitivity import sensitive_products as sensitive_products
from ._updates import LostUpdates as LostUpdates
from ._updates import lost_updates as lost_updates
