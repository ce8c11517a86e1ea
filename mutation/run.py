"""Would the tests notice a mistake? cosmic-ray makes some in a clone of the repository.

The sessions of the modules are in `mutants/`, where an interrupted run goes on.
"""

import argparse
import ast
import contextlib
import glob
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.commands import execute, init
from cosmic_ray.config import ConfigDict
from cosmic_ray.mutating import mutate_code
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import WorkerOutcome, WorkResult
from mistakes import OPERATORS

REPOSITORY, SESSIONS = Path(__file__).parents[1], Path("mutants").resolve()
plugins.OPERATOR_PROVIDERS["calls"] = OPERATORS

MODULES = re.compile(
    r"(_(scaling|half_storage|autocast)/.*(?<!__init__)|checkpoints|"
    r"_(tree|mesh|state|validation|policy|pytree|jaxpr))\.py"
)
OF_OTHERS = {"_jaxpr": "autocast", "checkpoints": "half_storage"}  # folders of tests
ALSO = ["jmp", "mistakes", "policy", "mesh", "sharding", "checkpoints", "optimizers"]
PYTEST = [sys.executable, "-m", "pytest", "-xq", "-o", "addopts="]
PYTEST += ["-m", "not slow and not targets"]
# Nobody writes `<<` for `+` by mistake, or loses a decorator.
PLAUSIBLE = re.compile(
    r"(?!ReplaceBinary|ReplaceComparison|RemoveDecorator)|"
    r"\w+Operator(_(Add|Sub|Mul|Div)){2}$|\w+Operator(_(FloorDiv|Mod|Mul|Pow)){2}$|"
    r"\w+Operator(_Bit(And|Or|Xor)){2}$|\w+Operator(_(Lt|LtE|Gt|GtE|Eq|NotEq)){2}$|"
    r"\w+Operator(_(Is|IsNot)){2}$|\w+Operator(_(In|NotIn)){2}$"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", help="such as _tree, _scaling/skip")
    parser.add_argument("--sample", type=int, default=24, help="of each module (24)")
    args = parser.parse_args()
    SESSIONS.mkdir(exist_ok=True)
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        # Most programs of a mistaken module are those of the right one.
        "JAX_COMPILATION_CACHE_DIR": str(SESSIONS / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    print("| module | places | mistakes | noticed |\n| --- | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as work:
        subprocess.run(["git", "clone", "-q", REPOSITORY, work], check=True)
        os.environ["PYTHONPATH"] = work
        os.chdir(work)
        files = sorted(glob.glob("**/*.py", root_dir="jmp_scale", recursive=True))
        for file in args.modules or filter(MODULES.fullmatch, files):
            _run(file.removesuffix(".py"), args.sample)


def _run(module: str, count: int) -> None:
    """Makes the mistakes that have no result yet, and prints the module's row."""
    path, generator = Path(f"jmp_scale/{module}.py"), random.Random(0)
    with use_db(str(SESSIONS / f"{module.replace('/', '.')}.sqlite")) as db:
        if not db.num_work_items:
            init([path], db, {})
        places = _places(db, path.read_text())
        if not db.num_results:
            chosen = [generator.choice(mistakes) for mistakes in places]
            chosen = set(generator.sample(chosen, min(count, len(chosen))))
            others = {item.job_id for item in db.work_items} - chosen
            db.set_multiple_results(others, WorkResult(WorkerOutcome.SKIPPED))
        if db.pending_work_items:
            start, command = time.monotonic(), _command(module)
            subprocess.run(shlex.split(command), check=True, stdout=sys.stderr)
            timeout = 60 + 3 * (time.monotonic() - start)
            config = {"test-command": command, "timeout": timeout}
            execute(db, ConfigDict(config, distributor={"name": "local"}))
        ran = [r for _, r in db.results if r.worker_outcome == WorkerOutcome.NORMAL]
        row = module, len(places), len(ran), sum(result.is_killed for result in ran)
    print("| `{}` | {} | {} | {} |".format(*row), flush=True)


def _places(db: WorkDB, source: str) -> list[list[str]]:
    """The mistakes at each place of a source, by their names in the session."""
    excluded, places = list(_excluded(source)), defaultdict(list)
    for item in sorted(db.work_items, key=lambda item: str(item.mutations)):
        (mistake,) = item.mutations
        kind, start = mistake.operator_name.partition("/")[2], mistake.start_pos
        outside = not any(low <= start < high for low, high in excluded)
        if outside and PLAUSIBLE.match(kind):
            operator = plugins.get_operator(mistake.operator_name)()
            with contextlib.suppress(SyntaxError):
                ast.parse(mutate_code(source, operator, mistake.occurrence))
                places[start, kind.split("_")[0]].append(item.job_id)
    return [places[key] for key in sorted(places)]


def _excluded(source: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a mistake changes no behaviour: annotations, decorators, messages."""
    for node in ast.walk(ast.parse(source)):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        parts += getattr(node, "decorator_list", [])
        if isinstance(node, ast.Raise | ast.JoinedStr):
            parts.append(node)
        for x in filter(None, parts):
            yield (x.lineno, x.col_offset), (x.end_lineno, x.end_col_offset)


def _command(module: str) -> str:
    """Its own tests first, then its wing's, and others: the first failure ends it."""
    tests, path = Path("tests"), Path(module.removeprefix("_"))
    folder = path.parts[0] if path.parent.name else OF_OTHERS.get(module, "scaling")
    files = [tests / path.parent / f"test_{path.name}.py"]
    files += sorted((tests / folder).rglob("test_*.py"))
    files += [tests / f"test_{name}.py" for name in ALSO]
    paths = [str(path) for path in dict.fromkeys(files) if path.exists()]
    return shlex.join([*PYTEST, *paths])


if __name__ == "__main__":
    main()
