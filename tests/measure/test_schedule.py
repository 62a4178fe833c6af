import measured_stack as stack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jremat.measure import wire
from jremat.measure.compile import compiled, lower
from jremat.measure.schedule import Schedule
from jremat.measure.targets import target


def varint(n):
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes([*out, n])


@given(st.lists(st.tuples(st.integers(1, 500), st.one_of(st.integers(0, 2**63), st.binary(max_size=300)))))
def test_fields_read_back(rows):
    data = b""
    want: dict = {}
    for number, value in rows:
        if isinstance(value, int):
            data += varint(number << 3) + varint(value)
        else:
            data += varint(number << 3 | 2) + varint(len(value)) + value
        want.setdefault(number, []).append(value)
    assert wire.fields(data) == want


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data):
    try:
        wire.fields(data)
    except ValueError as error:
        assert str(error).startswith("message: ")


@given(st.lists(st.integers(0, 2**40)))
def test_packed_numbers(numbers):
    packed = b"".join(map(varint, numbers))
    data = varint(1 << 3 | 2) + varint(len(packed)) + packed
    assert wire.numbers(wire.fields(data), 1) == tuple(numbers)


@pytest.fixture(scope="module", params=["cpu", "h200"])
def program(request, tmp_path_factory):
    kind = target(request.param)
    folder = tmp_path_factory.mktemp("dump")
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True}
    done = compiled(lower(stack.step("keep_up"), stack.shapes(), kind), kind, xla_remat=False, compiler_options=options)
    (found,) = folder.glob("*after_optimizations.hlo.pb")
    return Schedule(found.read_bytes()), done.memory_analysis()


def test_the_replayed_heap_is_the_compilers_temporaries(program):
    """Against the compiler's own total; what lies between is alignment and holes, few in a heap of this size."""
    schedule, m = program
    peak, alive = schedule.alive_at_peak()
    assert sum(life.nbytes for life in alive) == peak
    assert m.temp_size_in_bytes * 0.97 <= peak <= m.temp_size_in_bytes


def test_held_buffers_are_arguments_and_results(program):
    schedule, m = program
    held = sum(life.nbytes for life in schedule.held())
    assert held == pytest.approx(m.argument_size_in_bytes + m.output_size_in_bytes, rel=0.001)


def test_instructions_know_their_shapes(program):
    schedule, _ = program
    up = (stack.LAYERS, stack.HIDDEN, 4 * stack.HIDDEN)
    arguments = [schedule.instructions[i] for i in schedule.entry_ids if schedule.instructions[i].opcode == "parameter"]
    assert ("bfloat16", up) in [a.shape_at(()) for a in arguments]
    assert {a.op_name for a in arguments} >= {"params['up']", "params['down']", "x"}


def test_two_heaps_worth_of_sharing():
    """A trace by hand: b shares a's place, which is free when both are; c then fits under the peak."""

    def field(number, value):
        if isinstance(value, int):
            return varint(number << 3) + varint(value)
        return varint(number << 3 | 2) + varint(len(value)) + value

    instruction = field(1, b"add") + field(2, b"add") + field(35, 7) + field(3, field(2, 11))
    module = field(3, field(2, instruction) + field(5, 1) + field(6, 7)) + field(6, 1)
    buffers = b"".join(
        field(1, field(1, number) + field(2, size) + field(3, field(4, 7)))
        for number, size in ((1, 100), (2, 100), (3, 60))
    )
    event = lambda kind, buffer, share=0: field(1, field(1, kind) + field(2, buffer) + field(5, share))
    events = event(0, 1) + event(2, 2, 1) + event(1, 1) + event(0, 3) + event(1, 2) + event(1, 3)
    schedule = Schedule(field(1, module) + field(3, buffers + field(4, events)))
    peak, alive = schedule.alive_at_peak()
    assert peak == 160
    assert [life.nbytes for life in alive] == [100, 60]


def test_an_unreadable_dump_is_refused():
    with pytest.raises(ValueError, match="message: "):
        Schedule(b"\x0a\x05abc").alive_at_peak()
    assert Schedule(b"").alive_at_peak() == (0, [])
