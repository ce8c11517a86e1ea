"""Several processes on one machine: one S history, and a lost process costs no bit."""

import contextlib
import functools
import math
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import threading

import pytest
from helpers import reference_rule

pytestmark = pytest.mark.slow

REPOSITORY = pathlib.Path(__file__).parents[1]
DEVICES = 4
PERIOD = 8
SCRIPT = str(REPOSITORY / "examples" / "multihost.py")
COMMAND = [sys.executable, SCRIPT, f"--period={PERIOD}"]
HEARTBEAT_TIMEOUT = 10
LIMIT = 240  # seconds for a run to end, of which it needs about 10
ENVIRONMENT = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "PYTHONPATH": str(REPOSITORY),
    "XLA_FLAGS": "--xla_backend_optimization_level=0",  # halves the time to compile
}


@contextlib.contextmanager
def processes(commands, folder):
    """Started processes; none outlives the test, and their output goes to `folder`."""
    with contextlib.ExitStack() as ends:
        started = []
        for i, command in enumerate(commands):
            errors = ends.enter_context((folder / f"stderr{i}").open("w"))
            pipes = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
            process = subprocess.Popen(command, env=ENVIRONMENT, **pipes)
            started.append(ends.enter_context(process))
            ends.callback(process.kill)  # before its end is waited for
        yield started


def by_hand(count, *args):
    """The commands of `count` processes that hold `DEVICES` devices together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = [*COMMAND, f"--cpu-devices={DEVICES // count}", *map(str, args)]
    if count == 1:
        return [common]
    distributed = [f"--coordinator=127.0.0.1:{port}", f"--num-processes={count}"]
    return [[*common, *distributed, f"--process-id={i}"] for i in range(count)]


def run(commands, folder):
    """What the processes print until all of them have ended well."""
    with processes(commands, folder) as started:
        outputs = [process.communicate(timeout=LIMIT)[0] for process in started]
        for i, process in enumerate(started):
            assert process.returncode == 0, (folder / f"stderr{i}").read_text()[-3000:]
    return "".join(outputs)


def reports(output):
    """([S before and after each step], digest of the state), as all processes agree."""
    # mpirun may put the lines of two processes behind each other.
    histories = re.findall(r"S history \(step:S\) ((?: ?\d+:2\^-?\d+)+)", output)
    digests = re.findall(r"sha256 of the state ([0-9a-f]{64})", output)
    assert len(set(histories)) == len(set(digests)) == 1, output
    return histories[0], digests[0]


def expected_history(steps, overflow_at, first_step=0):
    """The same by the rule in plain Python."""
    rule = reference_rule([i not in overflow_at for i in range(steps)], period=PERIOD)
    exponents = [15, *(round(math.log2(s)) for s, _, _ in rule)]
    changes = [i for i in range(1, steps + 1) if exponents[i] != exponents[i - 1]]
    shown = [first_step, *(i for i in changes if i > first_step)]
    return " ".join(f"{i}:2^{exponents[i]}" for i in shown)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """(checkpoints, last saved step) of a killed run, whose survivor ends in time."""
    folder = tmp_path_factory.mktemp("killed")
    endless = by_hand(
        2, "--steps=1000000", "--save-every=10", "--overflow-at", 5,
        f"--heartbeat-timeout={HEARTBEAT_TIMEOUT}",
        "--checkpoint-dir", folder / "checkpoints",
    )  # fmt: skip
    with processes(endless, folder) as (survivor, lost):
        watchdog = threading.Timer(LIMIT, survivor.kill)
        watchdog.start()
        for line in survivor.stdout:
            if line.startswith("saved step 20"):
                break
        watchdog.cancel()
        assert survivor.poll() is None, (folder / "stderr0").read_text()[-3000:]
        lost.kill()
        survivor.wait(timeout=HEARTBEAT_TIMEOUT + 10)
        assert survivor.returncode != 0
    checkpoints = folder / "checkpoints"
    return checkpoints, max(int(x.name) for x in checkpoints.glob("[0-9]*"))


def plan(last):
    """(steps, steps that overflow): one before the last checkpoint, two after it."""
    return last + 12, [5, last + 3, last + 4]


@pytest.fixture(scope="module")
def never_killed(killed, tmp_path_factory):
    """`count -> (S history, digest)` of an undisturbed run, each run once."""
    steps, overflow_at = plan(killed[1])

    @functools.cache
    def reports_of(count):
        commands = by_hand(count, f"--steps={steps}", "--overflow-at", *overflow_at)
        output = run(commands, tmp_path_factory.mktemp("processes"))
        assert output.count("process") == 2 * count
        return reports(output)

    return reports_of


def test_any_number_of_processes_follows_the_rule_and_ends_with_the_same_bits(
    killed, never_killed
):
    runs = {count: never_killed(count) for count in (1, 2, 4)}
    expected = expected_history(*plan(killed[1]))
    assert {history for history, _ in runs.values()} == {expected}
    # A single process adds the gradients of its devices in another order.
    assert runs[2][1] == runs[4][1]


def test_a_restart_on_more_processes_is_bit_identical_to_a_run_that_was_never_killed(
    killed, never_killed, tmp_path
):
    checkpoints, last = killed
    steps, overflow_at = plan(last)
    shutil.copytree(checkpoints, tmp_path / "checkpoints")
    commands = by_hand(
        4, f"--steps={steps}", "--resume", "--save-every=1000000",
        "--overflow-at", *overflow_at, "--checkpoint-dir", tmp_path / "checkpoints",
    )  # fmt: skip
    history, digest = reports(run(commands, tmp_path))
    assert history == expected_history(steps, overflow_at, first_step=last)
    assert digest == never_killed(4)[1]


@pytest.mark.skipif(not shutil.which("mpirun"), reason="no mpirun (openmpi-bin)")
def test_mpirun_starts_the_same_run(tmp_path):
    mpirun = [
        "mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe",
        "--bind-to", "none",
        "--mca", "oob_tcp_if_include", "lo", "--mca", "btl", "self,tcp",
    ]  # fmt: skip
    command = [*mpirun, *COMMAND, "--steps=20", "--overflow-at", "3", "12"]
    output = run([command], tmp_path)
    assert "process 1 of 2" in output
    assert reports(output)[0] == expected_history(20, [3, 12])
