"""Would the tests notice a mistake? Runs them on mutants of the core modules.

A mutant is a copy of the package with one small mistake: `<` for `<=`, 0 for 1, the
branches of a `jnp.where` swapped, a keyword argument left out. Those that no test
notices are printed as differences. They are either a test that is missing, or equal to
the original in all that it does.

The package is copied to a temporary directory first. Each mutant runs in a fork of
this process, which has JAX imported: half of the time would be spent in that.
"""

import argparse
import difflib
import gc
import itertools
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from mutants import meaning, sample

REPOSITORY = Path(__file__).resolve().parent.parent

# The tests that mirror a module, and some that use it.
TESTS = {
    "_scaling/loss_scale": "scaling/test_loss_scale scaling/test_own_loss_scale "
    "test_validation scaling/test_gradients test_state_dict_docs "
    "diagnostics/run/test_diagnosis diagnostics/precision/test_comparison",
    "_tree": "test_tree test_policy scaling/test_loss_scale scaling/test_gradients "
    "autocast/test_function",
    "_mesh": "test_mesh scaling/test_transform test_sharding "
    "scaling/test_gradient_sums",
    "_scaling/finite": "scaling/test_finite test_mesh test_sharding",
    "_scaling/gradients": "scaling/test_gradients test_mistakes",
    "_scaling/transform": "scaling/test_transform test_optimizers "
    "scaling/test_spike_guard",
    "_scaling/skip": "scaling/test_skip test_optimizers scaling/test_transform",
    "_scaling/spike_guard": "scaling/test_spike_guard test_mistakes test_checkpoints",
    "_policy": "test_policy test_jmp",
    "_autocast/autocast": "autocast/test_autocast autocast/test_exact",
    "_autocast/interpreter": "autocast/test_autocast autocast/test_exact",
    "_autocast/provenance": "autocast/test_provenance autocast/test_autocast "
    "autocast/test_exact",
    "_autocast/recompute/units": "autocast/test_autocast autocast/test_exact",
    "_autocast/recompute/plan": "autocast/recompute/test_plan autocast/test_autocast "
    "autocast/test_exact",
    "_autocast/recompute/islands": "autocast/recompute/test_islands "
    "autocast/test_autocast autocast/test_exact",
    "_autocast/products": "autocast/test_products autocast/test_autocast "
    "autocast/test_exact",
    "_autocast/higher_order": "autocast/test_autocast autocast/test_types_first",
    "_autocast/marks": "autocast/test_marks autocast/test_autocast",
    **dict.fromkeys(
        ("_jaxpr", "_jaxpr_rewrite"),
        "test_jaxpr scaling/test_skip autocast/test_autocast",
    ),
    "_autocast/dot_general": "autocast/test_dot_general",
    "_autocast/picks": "autocast/test_picks",
    "_autocast/types_first": "autocast/test_types_first",
    "_half_storage/bfloat16": "half_storage/test_bfloat16 half_storage/test_storage",
    "_half_storage/parameters": "half_storage/test_parameters test_checkpoints",
    "_half_storage/storage": "half_storage/test_storage test_unreduced",
    "checkpoints": "test_checkpoints half_storage/test_parameters",
    "_state": "scaling/test_loss_scale test_checkpoints scaling/test_transform",
    "_validation": "test_validation test_mistakes scaling/test_loss_scale",
    "_pytree": "test_checkpoints scaling/test_loss_scale scaling/test_spike_guard",
}
# Of the tests that run many optimizers, these are left out: one of them says little
# more than adam, sgd, multi_steps and inject_hyperparams do.
SELECTION = (
    "not (lbfgs or backtracking or prodigy or adafactor or adamax or muon or "
    "schedule_free or lookahead or rmsprop or reduce_on_plateau or bf16_momentum or "
    "add_noise or measurement)"
)


def main() -> None:
    """Runs the mutants and prints those that survive, then a table."""
    arguments = _arguments()
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Most programs of a mutant are those of the original.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(arguments.folder / "cache")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    _import_all_but_the_package()
    with tempfile.TemporaryDirectory() as folder:
        work = _copy(Path(folder) / "work")
        for module in arguments.modules or TESTS:
            _run_module(work, module, arguments)
    _print_table(arguments.folder / "results.jsonl", arguments.seed)


def _run_module(work: Path, module: str, arguments: argparse.Namespace) -> None:
    results = arguments.folder / "results.jsonl"
    known = [row[:4] for row in _rows(results)]
    path = work / "jmp_scale" / f"{module}.py"
    original = path.read_text()
    if arguments.survivors:
        mutants = sample(original, sys.maxsize, arguments.seed)
        again = [row[:4] for row in _rows(results) if not row[4]]
        mutants = [m for m in mutants if [module, *m[:3]] in again]
    else:
        mutants = sample(original, arguments.sample, arguments.seed)
        mutants = [m for m in mutants if [module, *m[:3]] not in known]
    tests = Tests(work, TESTS[module], arguments.folder)
    tests.check(arguments.seconds)
    seen = {"", meaning(original)}
    for mutant in mutants:
        start, code = time.monotonic(), mutant.make()
        if meaning(code) in seen:
            continue
        seen.add(meaning(code))
        path.write_text(code)
        noticed = tests.notice(arguments.timeout)
        path.write_text(original)
        difference = "" if noticed else _difference(original, code)
        seconds = round(time.monotonic() - start)
        row = [module, *mutant[:3], noticed, difference, seconds]
        print(*row[:4], noticed or "SURVIVED", f"{seconds} s", flush=True)
        print(difference, end="", flush=True)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("modules", nargs="*", help="such as _tree; default all")
    add("--sample", type=int, default=24, help="mutants per module (24)")
    add("--seed", type=int, default=0)
    add("--seconds", type=float, default=10, help="of tests per mutant (10)")
    add("--timeout", type=int, default=300, help="seconds until a mutant hangs (300)")
    add("--survivors", action="store_true", help="run those again that survived")
    add("--folder", type=Path, default=Path("mutants"), help="of results; it resumes")
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.resolve()
    arguments.folder.mkdir(exist_ok=True)
    return arguments


def _import_all_but_the_package() -> None:
    import chex
    import flax.linen
    import flax.nnx
    import hypothesis
    import jax
    import optax
    import pytest

    # A process with JAX's threads must not be forked.
    from jax._src import xla_bridge

    # To shrink an example that fails takes minutes, and changes no answer.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("mutants", phases=phases, database=None)
    hypothesis.settings.load_profile("mutants")

    gc.freeze()  # most objects of the forks
    assert not xla_bridge._backends, "JAX started its devices"
    assert "jmp_scale" not in sys.modules, "the package was imported"
    del chex, flax, jax, optax, pytest


def _copy(work: Path) -> Path:
    ignored = shutil.ignore_patterns(".git", "__pycache__", ".*cache", "mutants")
    shutil.copytree(REPOSITORY, work, ignore=ignored)
    return work


def _rows(results: Path) -> list[list]:
    lines = results.read_text().splitlines() if results.exists() else []
    rows = [json.loads(line) for line in lines]
    return list({tuple(row[:4]): row for row in rows}.values())  # the last of each


class Tests:
    """The tests of a module: those that noticed most so far first, then the cheapest.

    Each run is a fork of this process. As a plugin of pytest it times the tests, puts
    them in order and leaves out the most expensive ones.
    """

    def __init__(self, work: Path, names: str, folder: Path) -> None:
        self.work = work
        self.names = names.split()
        self.folder = folder
        self.limit = math.inf
        self.timed: dict[str, float] = {}
        self.durations: dict[str, float] = {}
        self.noticed: Counter[str] = Counter()

    def check(self, seconds: float) -> None:
        """Runs the tests without a mutant, and takes the times."""
        for name in self.names:
            file = self.folder / f"{Path(name).name}.json"
            if not file.exists():
                sys.dont_write_bytecode = False  # of the tests' rewritten asserts
                status = self._run([name], 3600)
                if status != 0:
                    raise SystemExit(f"{name} fails without a mutant: {status}")
            self.durations |= json.loads(file.read_text())
        # Two mutants of one size within a second look equal to Python's cache.
        sys.dont_write_bytecode = True
        for cache in (self.work / "jmp_scale").rglob("__pycache__"):
            shutil.rmtree(cache)
        times = sorted(self.durations.values())
        total = list(itertools.accumulate(times))
        count = sum(t <= seconds for t in total)
        self.limit = times[count - 1]
        names, taken = " ".join(self.names), f"{total[count - 1]:.0f} s"
        print(f"{names}: {count} of {len(times)} tests, {taken}", flush=True)

    def notice(self, timeout: int) -> str:
        """How the tests notice a mutant: "failure", "timeout" or not at all, ""."""
        status = self._run(self.names, timeout)
        if status is not None and status not in (0, 1, 2):
            raise SystemExit(f"{self.names}: exit status {status}")
        if status == 1 and (self.work / "noticed_by.txt").exists():
            self.noticed[(self.work / "noticed_by.txt").read_text()] += 1
        return "timeout" if status is None else "failure" if status else ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        times, noticed = self.durations, self.noticed
        if self.limit < math.inf:
            items[:] = [i for i in items if times.get(i.nodeid, 0) <= self.limit]
            items.sort(key=lambda i: (-noticed[i.nodeid], times.get(i.nodeid, 0)))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            (self.work / "noticed_by.txt").write_text(report.nodeid)

    def pytest_runtest_call(self) -> None:
        self.start = time.process_time()

    def pytest_runtest_teardown(self, item: Any) -> None:
        if hasattr(self, "start"):
            self.timed[item.nodeid] = time.process_time() - self.start

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        first = next(iter(self.timed), "").partition("::")[0]
        file = self.folder / f"{Path(first).stem}.json"
        if exitstatus == 0 and not file.exists():
            file.write_text(json.dumps(self.timed))

    def _run(self, names: list[str], timeout: int) -> int | None:
        """The exit status of pytest, or None if it took too long."""
        child = os.fork()
        if child == 0:
            os._exit(self._run_here(names))
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                return 1 if code < 0 else code  # ended by a signal
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None

    def _run_here(self, names: list[str]) -> int:
        import pytest

        os.setsid()
        os.chdir(self.work)
        sys.path[:0] = [str(self.work), str(self.work / "tests")]
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
        output = os.open(self.work / "output.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-k", SELECTION]
        options += ["-m", "not slow", "-o", "addopts="]
        # Both are imported before pytest rewrites their asserts.
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        paths = [f"tests/{name}.py" for name in names]
        try:
            return int(pytest.main([*options, *paths], plugins=[self]))
        except BaseException:
            traceback.print_exc()
            return 3


def _difference(original: str, mutated: str) -> str:
    lines = difflib.unified_diff(original.split("\n"), mutated.split("\n"), n=0)
    return "\n".join(list(lines)[2:]) + "\n"


def _print_table(results: Path, seed: int) -> None:
    rows = _rows(results)
    total = Counter(row[0] for row in rows)
    noticed = Counter(row[0] for row in rows if row[4])
    print("| module | places | mutants | noticed |\n| --- | --- | --- | --- |")
    for name in total:
        source = (REPOSITORY / "jmp_scale" / f"{name}.py").read_text()
        places = len(sample(source, sys.maxsize, seed))
        print(f"| `{name}` | {places} | {total[name]} | {noticed[name]} |")


if __name__ == "__main__":
    main()
