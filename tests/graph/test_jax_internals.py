"""What ``jremat.jax_internals`` assumes of JAX, an assumption a test: those that fail on a new version say what."""

import ast
import contextlib
import functools
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jremat import jax_internals as internals
from jremat.graph.letters import Polynomial, Size
from jremat.graph.trace import user_line
from jremat.measure.compile import compiled, lower
from jremat.measure.hlo_schedule import HloSchedule
from jremat.measure.memory_analysis import measured
from jremat.measure.targets import target
from jremat.transform.linear_map import LinearMap

X = jnp.ones((4, 4))


@contextlib.contextmanager
def remat3(on=True):
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", on)
    try:
        yield
    finally:
        jax.config.update("jax_remat3", before)


@pytest.fixture(autouse=True)
def remat2():
    """Whatever JAX's default, each test is of the remat that it names."""
    with remat3(False):
        yield


def equations(f, *args):
    return jax.make_jaxpr(f)(*args).eqns


def only(f, *args):
    (eqn,) = equations(f, *args)
    return eqn


@jax.custom_vjp
def vjp_rule(x):
    return jnp.sin(x)


vjp_rule.defvjp(lambda x: (checkpoint_name(jnp.sin(x), "forward_rule"), (x, x, x)), lambda kept, ct: (ct * kept[0],))


@jax.custom_jvp
def jvp_rule(x):
    return jnp.sin(x)


jvp_rule.defjvp(lambda primals, tangents: (checkpoint_name(jnp.sin(*primals), "jvp_rule"), tangents[0]))


def test_primitives_have_these_names():
    found = {
        "NAME": only(lambda x: checkpoint_name(x, "a"), X),
        "SCAN": only(lambda x: lax.scan(lambda c, _: (c, None), x, length=2)[0], X),
        "WHILE": only(lambda x: lax.while_loop(lambda c: c.sum() < 3, jnp.sin, x), X),
        "COND": equations(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X)[-1],
        "REMAT": only(jax.checkpoint(jnp.sin), X),
        "CUSTOM_VJP": only(vjp_rule, X),
        "CUSTOM_JVP": only(jvp_rule, X),
    }
    assert {constant: eqn.primitive.name for constant, eqn in found.items()} == {
        constant: getattr(internals, constant) for constant in found
    }


def test_a_jit_is_a_call_and_one_that_places_its_arguments_is_none():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert internals.is_call(only(jax.jit(jnp.sin), X))
    assert not internals.is_call(only(jax.jit(jnp.sin, out_shardings=sharding), X))


def test_a_size_that_is_read_as_a_number_is_one_primitive():
    size = jax.export.symbolic_shape("b")[0]
    eqns = equations(lambda x: x * x.shape[0], jax.ShapeDtypeStruct((size,), jnp.float32))
    assert [eqn.params["dim"] for eqn in eqns if eqn.primitive.name == internals.SIZE] == [size]


def test_scopes_tell_forward_recompute_and_backward():
    def scopes(jaxpr, around=""):
        for eqn in internals.opened(jaxpr).eqns:
            inside = f"{around}/{internals.scopes(eqn)}"
            yield eqn.primitive.name, inside
            for inner, _ in internals.inner_jaxprs(eqn):
                yield from scopes(inner, inside)

    f = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    found = list(scopes(jax.make_jaxpr(jax.grad(lambda x: f(x).sum()))(X)))
    sines = [scope for name, scope in found if name == "sin"]
    assert any(internals.REMAT_SCOPE in scope for scope in sines), "where the recompute is"
    assert any(internals.JVP_SCOPE in scope and internals.REMAT_SCOPE not in scope for scope in sines), "the first run"
    assert any(internals.TRANSPOSE_SCOPE in scope for name, scope in found if name == "mul"), "the backward pass"


def test_inner_jaxprs_and_how_often_they_run():
    def times(f, *args):
        return [times for _, times in internals.inner_jaxprs(equations(f, *args)[-1])]

    assert times(lambda x: lax.scan(lambda c, _: (c, None), x, length=5)[0], X) == [5]
    assert times(lambda x: lax.fori_loop(0, x.shape[0], lambda _, c: jnp.sin(c), x), X) == [4]
    assert times(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X) == [1, 1]
    assert times(vjp_rule, X) == times(jvp_rule, X) == times(jax.checkpoint(jnp.sin), X) == [1]


def test_a_while_that_counts_to_a_literal_tells_its_trips():
    loop = lambda x: lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 1, jnp.sin(c[1])), (2, x))
    assert internals.trip_count(equations(loop, X)[-1]) == 5


def test_a_program_under_shard_map_runs_on_every_device():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    eqn = only(jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec), X)
    assert eqn.primitive.name == internals.SHARD_MAP
    assert [times for _, times in internals.inner_jaxprs(eqn)] == [1]


def test_a_kernel_runs_once_a_cell_of_its_grid():
    pallas = pytest.importorskip("jax.experimental.pallas")

    def copy(x, y):
        y[...] = x[...]

    spec = pallas.BlockSpec((1, 4), lambda k: (k, 0))
    kernel = pallas.pallas_call(copy, jax.ShapeDtypeStruct((4, 4), X.dtype), grid=(4,), in_specs=[spec], out_specs=spec)
    (eqn,) = [eqn for eqn in equations(kernel, X) if eqn.primitive.name == internals.PALLAS]
    assert [times for _, times in internals.inner_jaxprs(eqn)] == [4]


def test_the_forward_rule_of_a_custom_vjp_can_be_traced_from_its_equation():
    rule = internals.read_by_derivative(only(vjp_rule, X))
    assert [eqn.primitive.name for eqn in rule.eqns] == ["sin", "name"] and len(rule.outvars) == 1


def test_the_rule_of_a_custom_jvp_can_be_traced_from_its_equation():
    rule = internals.read_by_derivative(only(jvp_rule, X))
    assert "name" in [eqn.primitive.name for eqn in rule.eqns] and len(rule.outvars) == 1


def test_remat_holds_its_program_its_policy_and_whether_cse_is_prevented():
    held = internals.remat_of(only(jax.checkpoint(jnp.sin, policy=max, prevent_cse=False), X))
    assert [eqn.primitive.name for eqn in internals.opened(held.jaxpr).eqns] == ["sin"]
    assert (held.policy, held.prevent_cse, held.third) == (max, False, False)


def test_remat_under_jax_remat3_is_an_object_that_holds_the_same():
    policy = jax.checkpoint_policies.save_only_these_names("a")
    with remat3():
        assert internals.remat3_is_on()
        eqn = only(jax.checkpoint(jnp.sin, policy=policy), X)
    assert internals.is_remat(eqn) and not internals.remat3_is_on()
    held = internals.remat_of(eqn)
    assert [step.primitive.name for step in internals.opened(held.jaxpr).eqns] == ["sin"]
    assert held.policy is policy and held.third


def test_a_name_is_read_with_and_without_jax_remat3():
    name = lambda eqn: internals.tagged_name(eqn.primitive, eqn.params)
    assert name(only(lambda x: checkpoint_name(x, "a"), X)) == "a"
    with remat3():
        assert name(only(lambda x: checkpoint_name(x, "a"), X)) == "a"
    assert name(only(jnp.sin, X)) is None


def test_policies_that_jax_remat3_calls():
    asked = []

    def policy(primitive, *_, **__):
        asked.append(primitive.name)
        return False

    with remat3():
        jax.make_jaxpr(jax.grad(jax.checkpoint(lambda x: jnp.sin(checkpoint_name(x, "a")).sum(), policy=policy)))(X)
    assert bool(asked) == internals.remat3_calls_policies()


def test_the_answers_of_a_policy():
    offload = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["a"],
        names_which_can_be_offloaded=["b"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    answers = [offload(equations(functools.partial(checkpoint_name, name=n), X)[0].primitive, name=n) for n in "abc"]
    assert [internals.decision_of(answer) for answer in answers] == ["save", "offload", "recompute"]


def test_a_name_can_be_transposed_and_batched():
    linear = lambda x: checkpoint_name(2 * x, "a")
    assert jax.linear_transpose(linear, 1.0)(1.0)[0] == 2
    with remat3():
        assert jax.vmap(linear)(X).shape == X.shape


def test_an_integer_under_a_name_is_kept_under_jax_remat3():
    def chosen(x):
        return x * checkpoint_name(jnp.argmax(jnp.sin(x) @ x, 0), "place")

    with remat3():
        policy = jax.checkpoint_policies.save_only_these_names("place")
        found = jax.make_jaxpr(jax.grad(lambda x: jax.checkpoint(chosen, policy=policy)(x).sum()))(X)
    assert str(found).count("dot_general") == 1


def test_a_primitive_with_a_rule_for_its_derivative_is_found():
    assert internals.differentiates(only(jnp.sin, X)) and internals.differentiates(only(jvp_rule, X))
    assert not internals.differentiates(only(vjp_rule, X))


def test_the_parts_of_a_scan():
    loop = lambda x, w: lax.scan(lambda c, row: (c @ w + row, c), x, jnp.ones((3, 4, 4)))
    eqn = next(eqn for eqn in equations(loop, X, X) if eqn.primitive.name == internals.SCAN)
    assert internals.loop_parts(eqn) == (1, 1)
    assert {"length", "reverse", "unroll", "jaxpr"} <= set(eqn.params)


def test_effects_that_a_rerun_would_repeat():
    def prints(x):
        jax.debug.print("{}", x[0, 0])
        return x

    calls = lambda x: jax.experimental.io_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x[0, 0])
    from jax.experimental import io_callback  # noqa: F401 - so that the attribute is there

    assert not internals.harmful_effects(jax.make_jaxpr(prints)(X).jaxpr)
    assert internals.harmful_effects(jax.make_jaxpr(calls)(X).jaxpr)


def test_a_ref_from_outside_is_found_and_one_from_inside_becomes_a_value():
    def write(ref, x):
        ref[...] = x
        return x

    jaxpr = jax.make_jaxpr(write)(jax.new_ref(X), X).jaxpr
    (effect,) = internals.harmful_effects(jaxpr)
    assert internals.ref_of(jaxpr, effect) is jaxpr.invars[0] and internals.is_ref(jaxpr.invars[0].aval)

    def local(x):
        ref = jax.new_ref(x)
        ref[...] = jnp.sin(ref[...])
        return ref[...]

    pure = internals.without_local_refs(jax.make_jaxpr(local)(X).jaxpr)
    assert not pure.effects and "sin" in [eqn.primitive.name for eqn in pure.eqns]


def test_an_equation_is_run_again_with_its_line_and_its_scopes():
    eqn = only(lambda x: jnp.sin(x), X)
    again = only(lambda x: internals.bind(eqn, [x])[0], X)
    assert user_line(again) == user_line(eqn) != ""
    scoped = only(lambda x: jax.named_scope("scope")(jnp.sin)(x), X)
    assert "scope" in internals.scopes(only(lambda x: internals.bind(scoped, [x])[0], X))


@pytest.mark.parametrize("f", [vjp_rule, jvp_rule, jax.checkpoint(jnp.sin), jax.jit(jnp.sin)])
def test_an_equation_that_holds_a_function_is_run_again(f):
    np.testing.assert_array_equal(internals.bind(only(f, X), [X])[0], jnp.sin(X))


def test_frames_of_a_traceback_are_the_users():
    file, line, function = internals.user_frames(only(lambda x: jnp.sin(x), X).source_info.traceback)[0]
    assert file == __file__ and line > 0 and "test_frames" in function


def test_dead_code_goes():
    def f(x):
        jnp.cos(x)
        return jnp.sin(x)

    assert [eqn.primitive.name for eqn in internals.live(jax.make_jaxpr(f)(X).jaxpr).eqns] == ["sin"]


def test_a_type_of_symbolic_sizes_keeps_them():
    size = Size(8, Polynomial.of_text("b"))
    made = internals.sized_type(jax.typeof(X), (size, 4))
    assert made.shape[0] is size and made.dtype == X.dtype and jax.typeof(X).shape == (4, 4)


def test_a_batched_type_has_a_new_first_axis():
    seen = []

    def batch(axis, args, dims, **params):
        seen.append(internals.batched_type(jax.typeof(jnp.ones(3)), axis))
        return args, dims

    made = internals.new_primitive("tried", lambda x: [x], lambda x: [x], None, None, batch)
    jax.vmap(lambda x: made.bind(x)[0])(X)
    assert seen[0].shape == (4, 3)


def test_a_value_on_the_host_says_so():
    host = equations(lambda x: jax.device_put(x, jax.memory.Space.Host), X)[-1].outvars[0].aval
    assert internals.on_host(host) and not internals.on_host(jax.typeof(X))


def test_pytree_classes_are_known():
    class Block(nnx.Module):
        pass

    assert internals.is_pytree_class(Block) and not internals.is_pytree_class(type("Plain", (), {}))


def test_a_caches_entry_dies_with_its_program():
    class Held:
        pass

    count = []
    cached = internals.weakly_cached(lambda held: count.append(1))
    held = Held()
    cached(held), cached(held)
    assert len(count) == 1


def test_a_compiled_function_becomes_part_of_a_program_that_is_traced():
    f = internals.compiled(jnp.sin)
    (eqn,) = equations(f, X)
    assert eqn.primitive.name == "sin" or (internals.is_call(eqn) and eqn.params["inline"])
    np.testing.assert_array_equal(f(X), jnp.sin(X))


def test_key_reuse_checks_are_seen():
    assert not internals.checks_key_reuse()
    with jax.debug_key_reuse(True):
        assert internals.checks_key_reuse()


def test_a_new_primitive_has_its_rules():
    double = LinearMap(lambda _, t: [2 * t[0]], lambda _, ct: [2 * ct[0]])
    run = lambda x: double([], [x], [x])[0]
    assert run(3.0) == 6 and jax.linear_transpose(run, 0.0)(1.0)[0] == 2 and jax.jvp(run, (1.0,), (1.0,))[1] == 2
    assert jax.vmap(run)(jnp.ones(3)).shape == (3,) and jax.jit(run)(3.0) == 6


def test_flax_lifts_a_transformation_and_says_when_it_initializes():
    seen = []

    def transform(fn):
        def inner(scope_fn, repack_fn, variables, rngs, *args, **kwargs):
            scope = scope_fn(variables, rngs)
            seen.extend(map(internals.is_initializing, jax.tree.leaves(scope)))
            return fn(scope, *args, **kwargs), repack_fn(scope)

        return inner

    dense = internals.lift_linen(transform, nn.Dense, methods=["__call__"])(2)
    variables = dense.init(jax.random.key(0), X)
    assert dense.apply(variables, X).shape == (4, 2) and seen == [True, False]


def test_what_xla_dumps_is_read_by_its_schema(tmp_path):
    def step(w, x):
        return jax.grad(lambda w: (jnp.sin(x @ w) ** 2).sum())(w)

    cpu = target("cpu")
    program = compiled(
        lower(step, (X, X), cpu), cpu, xla_remat=False,
        compiler_options={"xla_dump_to": str(tmp_path), "xla_dump_hlo_as_proto": True},
    )  # fmt: skip
    (dump,) = tmp_path.glob("*after_optimizations.hlo.pb")
    schedule = HloSchedule(dump.read_bytes())
    text = program.as_text()
    entry = [i for i in schedule.instructions.values() if i.id in schedule.entry_ids]
    assert entry and all(f"{i.name} = " in text for i in entry), "names of instructions"
    assert {"parameter"} <= {i.opcode for i in entry}, "opcodes"
    parameters = [i for i in entry if i.opcode == "parameter"]
    assert {i.index for i in parameters} == {0, 1} and all(i.shapes() == [("float32", (4, 4))] for i in parameters)
    assert any(i.op_name.startswith("jit(step)/") for i in schedule.instructions.values()), "scopes"
    lines = [line for i in schedule.instructions.values() for line in i.lines]
    assert any(file == __file__ for file, _, _ in lines), "stack frames"
    assert any(i.operands for i in entry) and any(i.called for i in schedule.instructions.values()), "operands, calls"
    assert sum(life.nbytes for life in schedule.held()) == 3 * X.nbytes, "arguments and results"
    peak, alive = schedule.alive_at_peak()
    assert peak == sum(life.nbytes for life in alive) <= program.memory_analysis().temp_size_in_bytes


def test_the_figures_of_a_compiled_program():
    cpu = target("cpu")
    options = {"xla_remat": False, "compiler_options": {}, "num_buffers": 0, "tags": None}
    found, _ = measured(lower(jnp.sin, (X,), cpu), cpu, **options)
    assert (found.argument_bytes, found.output_bytes, found.host_bytes) == (64, 64, 0)


def test_a_compile_that_leaves_the_persistent_cache_out(tmp_path):
    """JAX asks ``compilation_cache.is_cache_used`` at each compile; a program from the cache has no buffers."""
    program = f"""
import jax, jax.numpy as jnp, jremat
jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
x = jnp.ones((64, 64))
f = lambda x: jnp.sort(jnp.sin(x) @ x) @ jnp.sort(x)
jax.jit(f).lower(x).compile()
print([len(jremat.compiled_memory(f, x, target="cpu").buffers) for _ in range(2)])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    counts = ast.literal_eval(done.stdout)
    assert counts[0] == counts[1] > 0 and any(tmp_path.iterdir())
