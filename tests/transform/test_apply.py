"""``jremat.apply``: policies on modules of somebody else's model, counted in bytes kept and matmuls recomputed."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jremat
from tests.transform import llamas
from tests.transform.llamas import ARRAY, LAYERS, X

LINEN = llamas.Llama()
VARIABLES = LINEN.init(jax.random.key(0), X)
NNX = llamas.NnxLlama(nnx.Rngs(0))


def counted(run, *args):
    """Bytes kept, and matmuls recomputed."""
    loss = lambda *args: jnp.sum(run(*args) ** 2)
    return (
        jremat.residuals(loss, *args).total_bytes,
        jremat.flops(jax.grad(loss, allow_int=True), *args).count.recompute,
    )


def both(rules):
    """The same rules on the Linen and on the NNX model: their counts, which must agree."""
    linen = counted(jremat.apply(LINEN, rules).apply, VARIABLES, X)
    if isinstance(rules, dict):
        rules = {path.replace("layers_", "layers/"): own for path, own in rules.items()}
    assert counted(lambda model, x: model(x), jremat.apply(NNX, rules), X) == linen
    return linen


@pytest.mark.parametrize(
    ("rules", "matmuls"),  # of a layer's 9, 8 run again: the last one's result is in the residual stream
    [
        ("full", 8 * LAYERS),
        ({"layers_*": "full"}, 8 * LAYERS),
        ({"layers_1": "full"}, 8),
        ("alternate:2", 8 * 2),
        ({"layers_*": "block:1,dots_saveable"}, 0),
        ({"layers_*": "save:*/attn/*"}, 2 * LAYERS),
        ({"*/mlp": "full"}, 2 * LAYERS),
        ({"layers_*/attn": "full", "layers_1/mlp": "full"}, 5 * LAYERS + 2),
        ({"layers_*": "full", "layers_1": "dots_saveable"}, 8 * 2),
    ],
)
def test_rules_reach_their_modules(rules, matmuls):
    assert both(rules)[1] == matmuls


def test_full_remat_keeps_the_layers_inputs_alone():
    assert both("full")[0] == LAYERS * ARRAY  # the first input is an argument; the last output the square's residual


def test_parameters_values_and_gradients_are_those_of_the_model():
    model = jremat.apply(LINEN, {"layers_*": "save:*/attn/*"})
    close = lambda a, b: jax.tree.all(jax.tree.map(lambda x, y: jnp.allclose(x, y, rtol=1e-4, atol=1e-3), a, b))
    assert close(model.init(jax.random.key(0), X), VARIABLES)
    grad = lambda model: jax.jit(jax.grad(lambda v: jnp.sum(model.apply(v, X) ** 2)))(VARIABLES)
    assert close(grad(model), grad(LINEN))
    mapped = jax.vmap(lambda x: model.apply(VARIABLES, x[None])[0])(X)
    assert close(mapped, LINEN.apply(VARIABLES, X))
    assert type(model).__name__ == "Llama" and isinstance(model, llamas.Llama)
    assert type(LINEN) is llamas.Llama and counted(LINEN.apply, VARIABLES, X)[1] == 0

    own = jremat.apply(NNX, {"layers/*": "full"})
    assert jax.tree.structure(nnx.state(own)) == jax.tree.structure(nnx.state(NNX))
    loss = lambda model: jnp.sum(model(X) ** 2)
    assert close(nnx.state(nnx.jit(nnx.grad(loss))(own)), nnx.state(nnx.jit(nnx.grad(loss))(NNX)))
    assert type(NNX.layers[0]) is llamas.NnxBlock


class Trained(nn.Module):
    """Set up ahead, with dropout and batch statistics, and more methods than one."""

    def setup(self):
        self.layers = [nn.Dense(8, name=f"layer_{k}") for k in range(2)]
        self.norm, self.drop = nn.BatchNorm(momentum=0.5), nn.Dropout(0.5)

    def __call__(self, x, train: bool):
        return self.norm(self.drop(self.encode(x), deterministic=not train), use_running_average=not train)

    def encode(self, x):
        for layer in self.layers:
            x = jnp.sin(layer(x))
        return x


def test_setup_dropout_statistics_and_other_methods():
    x = jnp.ones((4, 8))
    plain, model = Trained(), jremat.apply(Trained(), {"layer_*": "full", "norm": "full", "drop": "full"})
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x, train=False)
    assert jax.tree.structure(variables) == jax.tree.structure(plain.init(jax.random.key(0), x, False))
    run = lambda m: m.apply(variables, x, train=True, mutable=["batch_stats"], rngs={"dropout": jax.random.key(2)})
    assert jax.tree.all(jax.tree.map(lambda a, b: jnp.allclose(a, b, atol=1e-6), run(model), run(plain)))
    assert jnp.allclose(model.apply(variables, x, method="encode"), plain.apply(variables, x, method=plain.encode))


class Looped(nn.Module):
    """Layers by nn.scan, or jitted one by one."""

    jitted: bool = False

    @nn.compact
    def __call__(self, x):
        if self.jitted:
            for k in range(LAYERS):
                x = nn.jit(llamas.Block)(name=f"layers_{k}")(x)
            return x
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": LAYERS}
        return nn.scan(lambda block, x, _: (block(x), None), **axes)(llamas.Block(name="layers"), x, None)[0]


@pytest.mark.parametrize("jitted", [False, True])
def test_inside_flax_lifts_and_past_its_caches(jitted):
    plain = Looped(jitted)
    variables = plain.init(jax.random.key(0), X)
    assert counted(plain.apply, variables, X)[1] == 0  # traced as it is first: nn.jit remembers that
    model = jremat.apply(plain, {"layers*": "full"})
    assert counted(model.apply, variables, X)[1] == 8 * LAYERS
    assert counted(plain.apply, variables, X)[1] == 0


def test_as_a_part_of_another_model():
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x):
            return self.inner(nn.Dense(llamas.WIDTH)(x))

    model = Outer(jremat.apply(LINEN, {"layers_*": "full"}))
    variables = model.init(jax.random.key(0), X)
    assert counted(model.apply, variables, X)[1] == 8 * LAYERS


@pytest.mark.parametrize("model", [LINEN, NNX], ids=["linen", "nnx"])
@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"layer_*": "full"}, r"'layer_\*' matches no module of \w*Llama \(did you mean 'layers"),
        ({"layers*": "full", "enc/*": "full"}, r"'enc/\*' matches no module of \w*Llama; its modules: layers"),
        ("every_k:2", r"joins layers in groups or a schedule"),
        ("auto", r"needs shapes"),
        ({"layers*": "mix:2*full"}, r"names 2 layers, the stack has 3"),
        ("fulll", r"did you mean 'full'"),
        (3, r"expected a policy or a plan over layers, or a spec such as 'full', got 3"),
    ],
)
def test_what_cannot_be_applied_raises(model, rules, message):
    with pytest.raises(ValueError, match=message):
        made = jremat.apply(model, rules)
        made.init(jax.random.key(0), X)
    with pytest.raises(ValueError, match="model: expected a Linen or an NNX module, got <function"):
        jremat.apply(counted, "full")


def test_a_place_inside_a_module_that_is_not_there():
    model = jremat.apply(LINEN, {"layers_*": "save:*/cross/*"})
    with pytest.raises(ValueError, match=r"'\*/cross/\*', where no value is made; paths in this function: "):
        model.apply(VARIABLES, X)
