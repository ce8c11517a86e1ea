"""The command that compares steps, here and for machines that are not there."""

import json
import os

import _tables
import _targets
import overhead
import pytest

pytestmark = pytest.mark.targets

SMALL = ["--parts", "optimizer", "--dtypes", "f16", "--layers", "1", "--width", "16"]
SMALL += ["--peers", "with_loss_scale", "--no-times"]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The command sets XLA's flags for its own process."""
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))


def rows_of(tmp_path, *arguments):
    """The rows of the only table, each by the names of its columns."""
    overhead.main([*SMALL, *arguments, "--json", str(tmp_path / "tables.json")])
    (table,) = json.loads((tmp_path / "tables.json").read_text())["tables"]
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def test_this_machine_has_a_row_for_each_step(tmp_path, capsys):
    unscaled, scaled = rows_of(tmp_path, "--optimizers", "lion")
    assert unscaled["step"] == "unscaled"
    assert unscaled["bytes"] == "1.000"
    assert 1 < float(scaled["bytes"]) < 1.1
    assert scaled["copied arrays"] == unscaled["copied arrays"]
    assert "### Lion alone, f16 gradients" in capsys.readouterr().out


@pytest.mark.skipif(
    _targets.missing("h100") is not None, reason=f"h100: {_targets.missing('h100')}"
)
def test_chips_that_are_not_there_have_one_too(tmp_path, capsys):
    _, scaled = rows_of(tmp_path, "--target", "h100", "--chips", "4")
    assert scaled["added collectives"] == "1 all-reduce of pred[]"
    assert scaled["waits"] == 0
    assert "compiled for h100, not run" in capsys.readouterr().out


def test_a_compiler_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(_targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="--group tpu-compile"):
        overhead.main([*SMALL, "--target", "tpu-v6e"])


def test_cells_that_are_alike_in_several_cases_stand_once():
    columns = ["step", "x", "y"]
    one = _tables.Table("T {}", columns, [["a", 1, 2.0], ["b", 1, 3.0]], ["n"], "1")
    four = _tables.Table("T {}", columns, [["a", 1, 2.5], ["b", 1, 3.0]], ["n"], "4")
    folded = _tables.folded([one, four])
    assert (folded.title, folded.columns) == ("T 1 / 4", columns)
    assert folded.rows == [["a", "1", "2 / 2.5"], ["b", "1", "3"]]
    assert folded.notes == ["n"]
