import json

import _targets
import autocast
import jax
import pytest
import sharded
from helpers import one_of


@pytest.mark.parametrize("name", one_of(3, autocast.LARGE | autocast.SMALL))
def test_every_model_is_traced_by_hand_with_a_checkpoint_around_each_block(name):
    model, half = autocast.MODELS[name], autocast.HALF["bf16"]
    loss = autocast.PROGRAMS["by hand, checkpoint"](model, half)
    program = str(jax.make_jaxpr(loss)(*autocast.types(model)))
    assert program.count("bf16[") > program.count("prevent_cse=True") > 0


@pytest.mark.slow
def test_rows_of_a_file_are_compared_and_those_that_lack_are_measured(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(_targets, "missing", lambda name: None)
    monkeypatch.setattr(autocast, "SEEDS", 2)
    memory = {"gpt4 | by hand": 300, "gpt8 | by hand": 700}
    memory |= {"gpt4 | autocast": 270, "gpt8 | autocast": 470}
    rows = {f"h100 | bf16 | {k}": {autocast.MEMORY: v} for k, v in memory.items()}
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    command = "--parts compiled error --targets h100 --models gpt8 mlp"
    autocast.main([*command.split(), "--programs", "autocast", "--resume", str(file)])
    assert "| gpt8 | autocast | 0.671 | 0.500 |" in capsys.readouterr().out
    found = json.loads(file.read_text())["error | bf16 | mlp | autocast"]
    assert 1e-3 < found["error of the gradient"] < 0.02


def test_rows_of_many_devices_are_compared_with_those_by_hand(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(_targets, "missing", lambda name: None)
    file, case = tmp_path / "rows.json", "h100:8 | AdamW | f16 | explicit | DP | u2"
    wire = {"by hand": 300, "autocast": 270, "autocast, half parameters": 150}
    wire |= {f"{name}{sharded.SUMS}": 150 for name in [*wire][1:]}
    rows = {f"{case} | {name}": {"wire, MB": mb} for name, mb in wire.items()}
    file.write_text(json.dumps(rows))
    command = "--targets h100:8 --steps AdamW --dtypes f16 --axes explicit"
    command += f" --layouts DP --models u2 --resume {file}"
    sharded.main(command.split())
    cells = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    wires = {cell[2]: cell[7] for cell in cells if cell[0] == "| DP"}
    assert list(wires.values()) == ["300", "0.900", "0.500", "0.500", "0.500"]
    with pytest.raises(SystemExit):
        sharded.main(["--targets", "h100"])
    assert "expected NAME:CHIPS, got 'h100'" in capsys.readouterr().err
