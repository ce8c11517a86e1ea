"""The rows of `overhead.py`: a step's figures beside those of the unscaled one."""

import collections
import functools

import _harness
import _problems
import jax
import jax.numpy as jnp
from _compiled import Figures, compilations, compile_step
from tqdm import tqdm

TEXTS = {
    "here": (
        "bytes: accessed, over the unscaled step's. temporaries: over the bytes of the "
        "parameters. compilations: over five steps. waits: branches, callbacks and "
        "transfers in the program. compile s: of all processor cores, and their ratio. "
        "time ratio: with its quartiles."
    ),
    "target": (
        "bytes: read from and written to the device's memory, over the unscaled "
        "step's. cycles: as the TPU's compiler estimates them, over the unscaled "
        "step's. temporaries: over the bytes of the parameters. compile s: of all "
        "processor cores. In parentheses: over the unscaled step's."
    ),
}


def compare(table, problem, peers, optimizer, pairs):
    """Adds a row per peer, with its figures, and time ratios if `pairs` > 0."""
    loss_fn, params, batch = problem
    table.columns = ["step", "bytes", "temporaries", "copied arrays", "scalars",
                     "kernels", "compilations", "waits", "compile s"]  # fmt: skip
    param_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    programs = {}
    base = None
    for peer in tqdm(peers, desc=table.title.format(table.case), leave=False):
        carry, step = _problems.build(peer, loss_fn, params, optimizer)
        programs[peer], found = compile_step(step, carry, batch)
        base = base or found
        table.rows.append([
            peer,
            f"{found.bytes_accessed / base.bytes_accessed:.3f}",
            f"{found.temporaries / param_bytes:.3f}",
            found.copied_arrays,
            len(found.copies) - found.copied_arrays,
            found.kernels,
            compilations(step, carry, batch),
            found.conditionals + found.transfers,
            _seconds(found.compile_seconds, base.compile_seconds),
        ])  # fmt: skip
    if pairs:
        table.columns.append("time ratio")
        build = functools.partial(_problems.build, optimizer=optimizer)
        carries = {peer: build(peer, loss_fn, params)[0] for peer in peers}
        add_times(table, programs, carries, batch, pairs)


def compare_on(target, table, problem, peers, optimizer):
    """Adds a row per peer, with the figures of a program compiled for a target."""
    loss_fn, params, batch = problem
    is_tpu = target.name.startswith("tpu")
    table.columns = ["step", "bytes", *["cycles"] * is_tpu, "kernels", "temporaries",
                     "copied arrays", "conditionals", "host operations",
                     "added collectives", "compile s"]  # fmt: skip
    param_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    base = None
    for peer in tqdm(peers, desc=table.title.format(table.case), leave=False):
        carry, step = _problems.build(peer, loss_fn, params, optimizer, types_only=True)
        found = compile_step(step, carry, batch, target)[1]
        base = base or found
        table.rows.append([
            peer,
            f"{found.bytes_accessed / base.bytes_accessed:.3f}",
            *[f"{found.cycles / max(base.cycles, 1):.3f}"] * is_tpu,
            f"{found.kernels} ({found.kernels / base.kernels:.2f})",
            f"{found.temporaries * target.chips / param_bytes:.3f}",
            found.copied_arrays,
            found.conditionals,
            found.transfers,
            added_collectives(found, base),
            _seconds(found.compile_seconds, base.compile_seconds),
        ])  # fmt: skip


def _seconds(found: float, base: float) -> str:
    return f"{found:.1f} ({found / base:.1f})"


def legend(target: str | None) -> str:
    """What the columns are, on this machine or for a target."""
    return TEXTS["here" if target is None else "target"]


def added_collectives(found: Figures, base: Figures) -> str:
    """The collectives that a program has more than another, as text."""
    more = collections.Counter(found.collectives)
    more.subtract(collections.Counter(base.collectives))
    parts = [
        f"{count} {kind} of {_short(types)}"
        for (kind, types), count in more.items()
        if count > 0
    ]
    return "; ".join(parts) or "none"


def _short(types: tuple[str, ...]) -> str:
    counted = collections.Counter(types).items()
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counted)


def add_times(table, programs, carries, batch, pairs):
    """Adds time ratios to the rows, "rejected" where a control shows a busy machine."""

    def runner(peer):
        leaves = jax.tree.map(jnp.copy, jax.tree.leaves(carries[peer]))

        def run():
            nonlocal leaves
            leaves, loss = programs[peer](leaves, batch)
            return leaves, loss

        return run

    base = runner("unscaled")
    before = _harness.paired_ratio(runner("unscaled"), base, pairs, "A/A control")
    ratios = {
        row[0]: _harness.paired_ratio(runner(row[0]), base, pairs, row[0])
        # The unscaled step, which is the first, comes last: a second control.
        for row in reversed(table.rows)
    }
    quiet = _harness.is_quiet(before) and _harness.is_quiet(ratios["unscaled"])
    table.notes.append(
        f"A/A control {before} before and {ratios['unscaled']} after, {pairs} pairs."
        + " Rejected: busy machine." * (not quiet)
    )
    for row in table.rows:
        row.append(str(ratios[row[0]]) if quiet else "rejected")
