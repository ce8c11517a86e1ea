"""The processor of this machine, as Linux describes it: read once, and here alone."""

import functools
import pathlib
import platform

_DESCRIPTION = pathlib.Path("/proc/cpuinfo")  # of Linux; other systems have none


@functools.cache
def has_bfloat16_units() -> bool:
    """Returns whether the CPU has matrix units for bfloat16 (Intel's AMX).

    False where the operating system does not say it.
    """
    return "amx_bf16" in _described("flags").split()


def processor_name() -> str:
    """Returns the number of processors and their name."""
    count = len(_values("model name"))
    named = platform.processor() or platform.machine()
    return f"{count} x {_described('model name')}" if count else named


def _described(field: str) -> str:
    return next(iter(_values(field)), "")


@functools.cache
def _values(field: str) -> tuple[str, ...]:
    """Returns what each processor's description says of a field."""
    if not _DESCRIPTION.exists():
        return ()
    pairs = (line.split(":", 1) for line in _DESCRIPTION.read_text().splitlines())
    return tuple(pair[-1].strip() for pair in pairs if pair[0].strip() == field)
