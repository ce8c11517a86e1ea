"""The counter of a program's memory traffic, on programs whose traffic is known."""

import pytest
from compilers import hlo, traffic, wire

pytestmark = pytest.mark.targets


def computation(name, *lines):
    """Text of a computation; what stands in the parentheses is not read."""
    return "\n".join([f"{name} (x: f32[1024]) -> f32[] {{", *lines, "}\n"])


def module(entry, others=""):
    main = computation("ENTRY %main", *entry.splitlines())
    return hlo.parse(f"HloModule test, is_scheduled=true\n{others}\n{main}")


X = "%x = f32[1024]{0} parameter(0)\n"
NEGATED = X + "ROOT %n = f32[1024]{0} negate(%x)"
ADD = computation("%add", "ROOT %sum = f32[] add(%a, %b)")
KNOWN = {
    "a fusion reads its operands once, whatever it does with them": (
        X + "ROOT %f = f32[1024]{0} fusion(%x, %x), kind=kLoop, calls=%fused",
        computation(
            "%fused",
            "%p = f32[1024]{0} parameter(0)",
            "%q = f32[1024]{0} parameter(1)",
            "%square = f32[1024]{0} multiply(%p, %q)",
            "ROOT %sum = f32[1024]{0} add(%square, %p)",
        ),
        3 * 4096,
    ),
    "a fusion that slices reads the slice": (
        X + "ROOT %f = f32[16]{0} fusion(%x), kind=kLoop, calls=%fused",
        computation("%fused", X, "ROOT %s = f32[16]{0} slice(%x), slice={[0:16]}"),
        2 * 64,
    ),
    "an update in place writes what it changes": (
        X + "%u = f32[16]{0} slice(%x), slice={[0:16]}\n"
        "%i = s32[] constant(3)\n"
        "ROOT %d = f32[1024]{0} dynamic-update-slice(%x, %u, %i)",
        "",
        2 * 64 + (64 + 4 + 64),
    ),
    "what moves nothing costs nothing": (
        X + "%b = f32[8,128]{1,0} bitcast(%x)\n"
        "%t = (f32[8,128]{1,0}, f32[1024]{0}) tuple(%b, %x)\n"
        "%g = f32[8,128]{1,0} get-tuple-element(%t), index=0\n"
        'ROOT %c = f32[8,128]{1,0} custom-call(%g), custom_call_target="ConcatBitcast"',
        "",
        0,
    ),
    "the workspace of a library's product is not traffic": (
        X + "ROOT %c = (f32[1024]{0}, s8[4194304]{0}) custom-call(%x), "
        'custom_call_target="__cublas$gemm"',
        "",
        8192,
    ),
    "start and done count once": (
        X + "%s = (f32[1024]{0}, f32[1024]{0}, u32[]) copy-start(%x)\n"
        "ROOT %d = f32[1024]{0} copy-done(%s)",
        "",
        8192,
    ),
    "an asynchronous all-reduce reads and writes once": (
        X + "%s = f32[1024]{0} all-reduce-start(%x), to_apply=%add\n"
        "ROOT %d = f32[1024]{0} all-reduce-done(%s)",
        ADD,
        8192,
    ),
    "on-chip memory of a TPU is left out": (
        "%x = f32[1024]{0:T(1024)} parameter(0)\n"
        "%s = (f32[1024]{0:T(1024)S(1)}, f32[1024]{0:T(1024)}, u32[]{:S(2)}) "
        "copy-start(%x)\n"
        "%d = f32[1024]{0:T(1024)S(1)} copy-done(%s)\n"
        "ROOT %c = f32[1024]{0:T(1024)S(1)} negate(%d)",
        "",
        4096,
    ),
    "a loop's body counts as often as it runs": (
        X + "ROOT %w = f32[1024]{0} while(%x), condition=%cond, body=%body, "
        'backend_config={"known_trip_count":{"n":"5"}}',
        computation("%cond", X, "ROOT %true = pred[] constant(true)")
        + computation("%body", NEGATED),
        5 * 8192,
    ),
}


@pytest.mark.parametrize("program", KNOWN)
def test_the_traffic_of_a_known_program(program):
    entry, others, expected = KNOWN[program]
    assert traffic.traffic(module(entry, others)) == expected


def test_kernels_are_what_computes_or_copies():
    counted = {name: traffic.kernels(module(*KNOWN[name][:2])) for name in KNOWN}
    assert counted["what moves nothing costs nothing"] == 0
    assert counted["start and done count once"] == 0
    assert counted["an asynchronous all-reduce reads and writes once"] == 0
    assert counted["a loop's body counts as often as it runs"] == 5


def test_copies_within_the_device_and_collectives_are_listed():
    within = module(*KNOWN["start and done count once"][:2])
    prefetch = module(*KNOWN["on-chip memory of a TPU is left out"][:2])
    assert list(map(str, traffic.copies(within))) == ["f32[1024]"]
    assert traffic.copies(prefetch) == []
    program = module(*KNOWN["an asynchronous all-reduce reads and writes once"][:2])
    assert traffic.collectives(program) == [("all-reduce", ("f32[1024]",))]


CARRIED = "%c = (s32[], f32[1024]{0}) parameter(0)\n"
CARRIED += "%i = s32[] get-tuple-element(%c), index=0"
FUSED = computation("%all-reduce-scatter.1", X, "%r = f32[1024]{0} all-reduce(%x)")
SENT = {
    "of a gather that is started the result counts": (
        X + "%s = (f32[1024]{0}, f32[8192]{0}) all-gather-start(%x), "
        'backend_config={"is_sync":false}\n'
        "%d = f32[8192]{0} all-gather-done(%s)",
        "",
        [("all-gather", 32768, 1, True)],
    ),
    "a loop's condition says how often it runs on a TPU": (
        X + "%w = (s32[], f32[1024]{0}) while(%x), condition=%cond, body=%body",
        computation(
            "%cond",
            CARRIED,
            "%n = s32[] constant(12)",
            "ROOT %less = pred[] compare(%i, %n), direction=LT",
        )
        + computation(
            "%body",
            CARRIED,
            "%two = s32[] constant(2)",
            "%next = s32[] add(%i, %two)",
            "%y = f32[1024]{0} get-tuple-element(%c), index=1",
            "%r = f32[1024]{0} all-reduce(%y)",
            "ROOT %t = (s32[], f32[1024]{0}) tuple(%next, %r)",
        ),
        [("all-reduce", 6 * 2 * 4096, 6, False)],
    ),
    "a TPU fuses an all-reduce and a slice to a reduce-scatter": (
        X + "%f = f32[128]{0} fusion(%x), calls=%all-reduce-scatter.1",
        FUSED,
        [("reduce-scatter", 4096, 1, False)],
    ),
}


@pytest.mark.parametrize("program", SENT)
def test_what_crosses_the_wire_in_a_known_program(program):
    entry, others, expected = SENT[program]
    text = f"{others}\n{computation('ENTRY %main', *entry.splitlines())}"
    found = wire.sent(wire.parse(text))
    assert [(x.kind, x.bytes, x.times, x.asynchronous) for x in found] == expected


def test_what_waits_for_the_host_is_counted():
    callback = module(
        X + "ROOT %c = f32[1024]{0} custom-call(%x), "
        'custom_call_target="xla_ffi_python_gpu_callback"'
    )
    offloaded = module(X + "ROOT %c = f32[1024]{0:S(5)} copy(%x)")
    assert traffic.host_operations(callback) == 1
    assert traffic.host_operations(offloaded) == 1
