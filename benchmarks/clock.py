"""Times programs on this machine, in turn, each part in a process of its own.

    python benchmarks/clock.py --seconds 545 --rows rows.jsonl
    python benchmarks/clocked.py rows.jsonl

The parts run in their order, each for its own limit of seconds and as long as time is
left. A figure is a line of JSON, which is printed as soon as it is known and added to
the file of `--rows`; `clocked.py` makes tables of them. On a CPU without matrix units
for bfloat16 the parts run and their rows say so.
"""

import argparse
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence

_GRACE = 12  # seconds in which a part may end by itself after its limit
_LEAST = 15  # seconds that a part needs


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    if args.part is not None:
        _run(args)
        return
    end = time.monotonic() + args.seconds
    failed = [part for part in args.parts if not _in_process(part, args, end)]
    if failed:
        sys.exit(f"not measured: {', '.join(failed)}")


def _in_process(part: str, args: argparse.Namespace, end: float) -> bool:
    """Runs a part; returns whether it ended well. This process has no device."""
    from _clock_parts import PARTS

    left = end - time.monotonic()
    if left < _LEAST:
        print(f"no time for {part}", file=sys.stderr, flush=True)
        return False
    limit = min(left, PARTS[part].seconds * args.slower)
    command = [sys.executable, __file__, "--part", part, "--seconds", str(limit)]
    command += ["--size", args.size] if args.size else []
    command += ["--rows", str(args.rows)] if args.rows else []
    print(f"{part}: {PARTS[part].question}", file=sys.stderr, flush=True)
    try:
        return subprocess.run(command, timeout=limit + _GRACE).returncode == 0
    except subprocess.TimeoutExpired:
        text = f"{part} was cut off; --slower {4 * args.slower:g} gives it more time"
        print(text, file=sys.stderr, flush=True)
        return False


def _run(args: argparse.Namespace) -> None:
    import jax
    from _clock import Clock
    from _clock_parts import PARTS, SIZES

    clock = Clock(args.part, args.seconds, args.rows)
    clock.say_machine()
    size = args.size or ("cpu" if jax.default_backend() == "cpu" else "gpu")
    PARTS[args.part].run(clock, SIZES[size])


def _parser() -> argparse.ArgumentParser:
    from _clock_parts import PARTS, SIZES

    parts = "\n".join(f"  {name:12}{part.question}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nparts:\n{parts}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all"
    )
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="for all parts together"
    )
    parser.add_argument(
        "--slower", type=float, default=1, help="factor of the limit of each part"
    )
    parser.add_argument("--rows", type=pathlib.Path, help="file that rows are added to")
    parser.add_argument(
        "--size", choices=SIZES, help="of the models; default: by the device"
    )
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
