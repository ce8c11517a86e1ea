"""What loss scaling and skipping cost, measured beside every peer.

The optimizer-only step takes given gradients, so that nothing hides the cost; the full
train step is a small transformer's. Carries are donated, gradients are those of a loss
scaled by 2^15. Ratios are to the step without scaling.

With `--target` the programs are compiled for a TPU or GPU that is not there, and the
figures are those compilers' own; see the README of this folder for what to install.
"""

import collections
import statistics
from collections.abc import Sequence
from typing import Any

import _harness
import _problems
import _steps
import _targets
import jax
import jax.numpy as jnp
from _compiled import Figures, compilations, compile_step
from tqdm import tqdm

PARTS = ("optimizer", "mixed", "train", "compile")


def compare(
    title: str,
    problem: tuple[Any, Any, Any],
    peers: Sequence[str],
    optimizer: str,
    pairs: int,
) -> _harness.Table:
    """One table: a row per peer, with the figures, and wall ratios if `pairs` > 0."""
    loss_fn, params, batch = problem
    param_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    columns = ["step", "bytes", "temporaries", "copied arrays", "scalars", "kernels",
               "compilations", "waits", "compile s", "compile ratio"]  # fmt: skip
    table = _harness.Table(title, columns + ["time ratio (quartiles)"] * (pairs > 0))
    programs = {}
    base = None
    for peer in tqdm(peers, desc=title, leave=False):
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
            f"{found.compile_seconds:.1f}",
            f"{found.compile_seconds / base.compile_seconds:.1f}",
        ])  # fmt: skip
    table.notes.append(
        "bytes: accessed, over the unscaled step's. temporaries: over the bytes of the "
        "parameters. compilations: over five steps. waits: branches, callbacks and "
        "transfers in the program. compile s: of all processor cores."
    )
    if pairs:
        carries = {
            peer: _problems.build(peer, loss_fn, params, optimizer)[0] for peer in peers
        }
        add_times(table, programs, carries, batch, pairs)
    return table


def compare_on(
    target: _targets.Target,
    title: str,
    problem: tuple[Any, Any, Any],
    peers: Sequence[str],
    optimizer: str,
) -> _harness.Table:
    """One table of programs that are compiled for a target."""
    loss_fn, params, batch = problem
    is_tpu = target.name.startswith("tpu")
    columns = ["step", "bytes", *["cycles"] * is_tpu, "kernels", "temporaries",
               "copied arrays", "conditionals", "host operations", "added collectives",
               "compile s", "compile ratio"]  # fmt: skip
    chips = f"{target.chips} x {target.name}"
    table = _harness.Table(f"{chips}: {title}", columns)
    param_bytes = sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)
    )
    base = None
    for peer in tqdm(peers, desc=table.title, leave=False):
        carry, step = _problems.build(peer, loss_fn, params, optimizer, types_only=True)
        found = compile_step(step, carry, batch, target)[1]
        base = base or found
        ratio = f"{found.kernels / base.kernels:.2f}"
        table.rows.append([
            peer,
            f"{found.bytes_accessed / base.bytes_accessed:.3f}",
            *[f"{found.cycles / max(base.cycles, 1):.3f}"] * is_tpu,
            f"{found.kernels} ({ratio})",
            f"{found.temporaries * target.chips / param_bytes:.3f}",
            found.copied_arrays,
            found.conditionals,
            found.transfers,
            added_collectives(found, base),
            f"{found.compile_seconds:.1f}",
            f"{found.compile_seconds / base.compile_seconds:.1f}",
        ])  # fmt: skip
    return table


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
    counted = collections.Counter(types)
    return ", ".join(
        f"{count} x {name}" if count > 1 else name for name, count in counted.items()
    )


def add_times(
    table: _harness.Table,
    programs: dict[str, Any],
    carries: dict[str, Any],
    batch: Any,
    pairs: int,
) -> None:
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


def compile_times(
    name: str, leaf_counts: Sequence[int], peers: Sequence[str], repeats: int
) -> _harness.Table:
    """Median seconds of compilation against the number of leaves of 64 x 64 entries."""
    title = (
        f"Compile seconds (and ratio) against the number of leaves, {name} gradients"
    )
    table = _harness.Table(title, ["step", *map(str, leaf_counts)])
    rows = {peer: [peer] for peer in peers}
    for count in leaf_counts:
        params = {f"leaf{i}": jnp.ones((64, 64)) for i in range(count)}
        loss_fn, params, batch = _problems.optimizer_only(
            _problems.DTYPES[name], params
        )
        seconds: dict[str, list[float]] = {peer: [] for peer in peers}
        for peer in tqdm(
            list(peers) * repeats, desc=f"{count} leaves, {name}", leave=False
        ):
            carry, step = _problems.build(peer, loss_fn, params)
            found = compile_step(step, carry, batch)[1]
            seconds[peer].append(found.compile_seconds)
        medians = {peer: statistics.median(seconds[peer]) for peer in peers}
        for peer, median in medians.items():
            rows[peer].append(f"{median:.1f} ({median / medians['unscaled']:.1f})")
    table.rows = list(rows.values())
    table.notes.append(f"Median of {repeats}, the steps in turn.")
    return table


def main(argv: Sequence[str] | None = None) -> None:
    args = _parser().parse_args(argv)
    _harness.round_as_written()
    if args.target is not None:
        jax.config.update("jax_platforms", "cpu")
        if (reason := _targets.missing(args.target)) is not None:
            raise SystemExit(f"overhead.py: --target {args.target} {reason}")
    wanted = ["unscaled", *(peer for peer in args.peers if peer != "unscaled")]
    peers, missing = _steps.installed(wanted)
    # The first compilation of a process takes longer.
    loss_fn, params, batch = _problems.optimizer_only(jnp.float32, {"w": jnp.ones(1)})
    carry, step = _problems.build("unscaled", loss_fn, params)
    targets = [_targets.Target(args.target, n) for n in args.chips if args.target]
    for target in targets[:1] or [None]:
        compile_step(step, carry, batch, target)

    tables = []
    for name in args.dtypes:
        if args.target is None:
            tables += _tables_here(name, args, peers)
        for target in targets:
            tables += _tables_of_target(name, args, peers, target)
    for table in tables:
        table.notes += [f"{peer}: not installed." for peer in missing]
    device = f"compiled for {args.target}, not run" if args.target else None
    _harness.report(tables, args.json, device)


def _tables_here(name: str, args: Any, peers: Sequence[str]) -> list[_harness.Table]:
    pairs = 0 if args.no_times else args.pairs
    tables = []
    for part, optimizer in _parts(args):
        if part == "compile":
            tables.append(compile_times(name, args.leaf_counts, peers, args.repeats))
            continue
        title, (loss_fn, params, batch) = _of(name, args)[part]
        params, batch = jax.tree.map(_filled, (params, batch))
        title = title.format(_problems.TITLES[optimizer])
        problem = loss_fn, params, jax.device_put(batch)
        tables.append(compare(title, problem, peers, optimizer, pairs))
    return tables


def _filled(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.full(leaf.shape, 1e-2, leaf.dtype)
    return leaf


def _tables_of_target(
    name: str, args: Any, peers: Sequence[str], target: _targets.Target
) -> list[_harness.Table]:
    tables = []
    for part, optimizer in _parts(args):
        if part != "compile":
            title, problem = _of(name, args)[part]
            title = title.format(_problems.TITLES[optimizer])
            tables.append(compare_on(target, title, problem, peers, optimizer))
    return tables


def _parts(args: Any) -> list[tuple[str, str]]:
    """The parts, each with its optimizers."""
    return [
        (part, optimizer)
        for part in args.parts
        for optimizer in (
            ["adamw"] if part in ("train", "compile") else args.optimizers
        )
    ]


def _of(name: str, args: Any) -> dict[str, Any]:
    examples = max(8, *args.chips)
    return _problems.problems(
        name, layers=args.layers, width=args.width, examples=examples
    )


def _parser() -> Any:
    parser = _harness.parser(__doc__)

    def several(flag: str, choices: Sequence[str], default: Any, text: str) -> None:
        parser.add_argument(
            flag, nargs="+", choices=list(choices), default=list(default), help=text
        )

    several("--parts", PARTS, ("optimizer", "train", "compile"), "tables to make")
    several("--dtypes", _problems.DTYPES, _problems.DTYPES, "of the gradients")
    several("--peers", _steps.PEERS, _steps.PEERS, "steps to compare")
    several("--optimizers", _problems.OPTIMIZERS, ["adamw"], "of the steps alone")
    parser.add_argument(
        "--target", choices=_targets.TARGETS, help="compile for this machine"
    )
    for flag, default, text in (
        ("--chips", [1], "of the target, parameters sharded over all of them"),
        ("--leaf-counts", [30, 100, 300], "of the compile table"),
    ):
        parser.add_argument(flag, nargs="+", type=int, default=default, help=text)
    for flag, default, text in (
        ("--layers", 12, "of the optimizer-only step's transformer"),
        ("--width", 256, "of both transformers"),
        ("--repeats", 3, "compilations of each step of the compile table"),
    ):
        parser.add_argument(flag, type=int, default=default, help=text)
    parser.add_argument(
        "--no-times", action="store_true", help="leave out the time ratios"
    )
    _harness.add_pairs(parser)
    return parser


if __name__ == "__main__":
    main()
