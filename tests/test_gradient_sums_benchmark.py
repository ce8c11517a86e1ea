import _hlo
import _targets
import gradient_sums
import pytest


def test_a_sum_in_float32_over_64_devices_errs_as_one_device_does():
    rows = {row[0]: row for row in gradient_sums.error_table([1, 64]).rows}
    one, many = (float(rows[count][2]) for count in (1, 64))
    assert many <= 1.1 * one
    assert float(rows[64][1]) > 2 * one


@pytest.mark.slow
@pytest.mark.parametrize("target", [("h100", 8), ("tpu-v5e", 4)], ids=str)
@pytest.mark.parametrize("sharding", ["data-parallel", "FSDP"])
def test_no_gradient_is_summed_in_float16_on_a_gpu_or_tpu(
    target, sharding, monkeypatch
):
    name, chips = target
    if reason := _targets.missing(name):
        pytest.skip(reason)
    shapes = {"in": (512, 1024), "bias": (1024,), "out": (1024, 512)}
    monkeypatch.setattr(gradient_sums, "SHAPES", shapes)
    monkeypatch.setattr(gradient_sums, "LAYERS", 1)
    found = {}
    for product in gradient_sums.PRODUCTS:
        compiled = gradient_sums.compile_step(
            _targets.Target(name, chips), sharding, product
        )
        module = _hlo.parse(compiled.as_text())
        found[product] = gradient_sums.moved_bytes(module, gradient_sums.SUMS)[0]
        if product == "autocast":
            gathers = gradient_sums.moved_bytes(module, gradient_sums.GATHERS)
            assert gathers[1] <= 4 * 1024  # weights cross the wire in half precision
    plain, automatic = found.values()
    assert plain >= 2 * 2 * 512 * 1024
    assert automatic == 0
