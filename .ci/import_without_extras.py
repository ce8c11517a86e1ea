"""Fails unless the package works without its extras, and names the missing one."""

import importlib
import sys

import jmp_scale

assert not {"flax", "matplotlib"} & set(sys.modules), (
    "the import of jmp_scale pulled in an extra"
)
assert float(jmp_scale.DynamicLossScale(8.0).scale(1.5)) == 12.0
for module, extra in {"linen": "flax", "nnx": "flax", "plotting": "plot"}.items():
    message = f"jmp_scale.{module} was importable, so {extra} is installed"
    try:
        importlib.import_module(f"jmp_scale.{module}")
    except ImportError as error:
        message = str(error)
    if f"jmp_scale[{extra}]" not in message:
        sys.exit(
            f"expected an ImportError that names the extra {extra}, got: {message}"
        )
print(f"jmp_scale {jmp_scale.__version__} imports without its extras")
