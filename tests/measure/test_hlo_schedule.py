import measured_stack as stack
import pytest

from jremat.measure.compile import compiled, lower
from jremat.measure.hlo_proto import FREE, SHARE, hlo_proto
from jremat.measure.hlo_schedule import HloSchedule
from jremat.measure.targets import target


@pytest.fixture(scope="module", params=["cpu", "h200"])
def program(request, tmp_path_factory):
    kind = target(request.param)
    folder = tmp_path_factory.mktemp("dump")
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_proto": True}
    done = compiled(lower(stack.step("keep_up"), stack.shapes(), kind), kind, xla_remat=False, compiler_options=options)
    (found,) = folder.glob("*after_optimizations.hlo.pb")
    return HloSchedule(found.read_bytes()), done.memory_analysis()


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

    program = hlo_proto(b"")
    computation = program.hlo_module.computations.add(id=1, root_id=7)
    computation.instructions.add(name="add", opcode="add", id=7).shape.element_type = 11
    for number, size in ((1, 100), (2, 100), (3, 60)):
        program.buffer_assignment.logical_buffers.add(id=number, size=size).defined_at.instruction_id = 7
    trace = program.buffer_assignment.heap_simulator_traces.add()
    for kind, buffer, share in ((0, 1, 0), (SHARE, 2, 1), (FREE, 1, 0), (0, 3, 0), (FREE, 2, 0), (FREE, 3, 0)):
        trace.events.add(kind=kind, buffer_id=buffer, share_with_canonical_id=share)
    schedule = HloSchedule(program.SerializeToString())
    peak, alive = schedule.alive_at_peak()
    assert peak == 160
    assert [life.nbytes for life in alive] == [100, 60]


def test_an_unreadable_dump_is_refused():
    with pytest.raises(ValueError, match="expected an HloProto of XLA, got 5 bytes"):
        HloSchedule(b"\x0a\x05abc").alive_at_peak()
    assert HloSchedule(b"").alive_at_peak() == (0, [])
