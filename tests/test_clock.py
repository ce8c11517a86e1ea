"""The benchmark with clocks: its rows, what it leaves out, and that its parts run."""

import json

import _clock_parts
import jax.numpy as jnp
import pytest
from _clock import Clock, Program


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_programs_take_turns_and_the_first_one_is_timed_beside_itself(tmp_path):
    path = tmp_path / "rows.jsonl"
    own = Clock("own", seconds=60, rows=path)

    def refused():
        raise ValueError("no such product")

    carried = Program(lambda s, x: (s + x, x), (jnp.zeros(3), jnp.ones(3)), carried=1)
    programs = {
        "a": lambda: Program(jnp.sin, (jnp.ones(3),)),
        "b": lambda: carried,
        "c": refused,
    }
    own.say_machine()
    own.take_turns("table", programs, rounds=3)
    rows = rows_of(path)
    assert {row["part"] for row in rows} == {"own"}
    times = {r["name"]: r for r in rows if "ms" in r and r["title"] == "table"}
    assert list(times) == ["a", "b", "a beside itself"]
    assert all(row["low"] <= row["ms"] <= row["high"] for row in times.values())
    assert times["a"]["to_first"] == 1
    (error,) = [row for row in rows if "error" in row]
    assert error["name"] == "c"
    assert "no such product" in error["error"]


@pytest.mark.slow
@pytest.mark.parametrize("part", _clock_parts.PARTS)
def test_each_part_runs_at_a_tiny_size(part, tmp_path, ranks_promote):
    path = tmp_path / "rows.jsonl"
    own = Clock(part, seconds=300, rows=path)
    _clock_parts.PARTS[part].run(own, _clock_parts.SIZES["tiny"])
    rows = rows_of(path)
    assert rows
    assert not [row for row in rows if "error" in row]


def test_a_part_that_is_cut_off_has_the_times_of_what_was_compiled(tmp_path):
    path = tmp_path / "rows.jsonl"

    def cut_off():
        raise KeyboardInterrupt

    programs = {
        "a": lambda: Program(jnp.sin, (jnp.ones(3),)),
        "b": lambda: Program(jnp.cos, (jnp.ones(3),)),
        "c": cut_off,
    }
    with pytest.raises(KeyboardInterrupt):
        Clock("own", seconds=60, rows=path).take_turns("table", programs)
    assert {row["name"] for row in rows_of(path) if "ms" in row} >= {"a", "b"}
