"""Your own model under remat policies: a Linen module, an NNX module and a plain function.

    python docs/examples/your_model.py

Each section has one model and puts three policies on it. It prints what the forward pass keeps for the backward pass,
and the matmul FLOPs that are recomputed, as a share of those that a step needs; nothing is run for that, and no GPU is
asked for. At the end a name is misspelt on purpose, and a planner is asked for the best policy under a budget. To see
every value, and why it is kept:

    jremat explain docs/examples/your_model.py:linen
    jremat explain docs/examples/your_model.py:layer --policy save:up --against full \\
        --args "{'up': f32[256,1024], 'down': f32[1024,256]}" 'f32[512,256]'

The first explains the model as it is written here. The second puts a policy on a function of one layer: a policy
belongs to a layer, since around a whole model it would recompute all layers at once.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jremat
import policies
from jremat import tag

TOKENS, WIDTH, HIDDEN, LAYERS = 512, 256, 1024, 4

# Shapes are enough to count: a ShapeDtypeStruct stands for an array of any size and holds no memory.
X = jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)

# Three of the specs that `python -m policies` lists. `none` keeps everything, `full` keeps a block's input and makes
# the rest again, and `save:up` keeps the values that are tagged "up" and recomputes the rest.
SPECS = ("none", "save:up", "full")

# For the planner: a deeper model, and what a device has for its whole training step.
DEEP, VOCABULARY, BUDGET_BYTES = 16, 2048, 230 * 2**20


# -- 1. A Linen module -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Your layer. The one line that is new is the tag: a name that policies can speak of. It changes no number."""

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        h = tag(nn.Dense(HIDDEN)(h), "up")  # [tokens, hidden]
        return x + nn.Dense(WIDTH)(nn.gelu(h))


class Model(nn.Module):
    """Your model. It is given the class of its layer, so that a policy can be put around each layer."""

    layer: type[nn.Module] = Block

    @nn.compact
    def __call__(self, x):
        for _ in range(LAYERS):
            x = self.layer()(x)
        return jnp.mean(x**2)  # stands for your loss


def linen(spec: str = "save:up"):
    """The loss of the Linen model, its layers under a policy, and the arguments to call it with."""
    model = Model(jremat.remat(Block, policies.get(spec)))  # in the place of nn.remat(Block, policy=...)
    variables = jax.eval_shape(model.init, jax.random.key(0), X)  # parameters as shapes; yours may be arrays
    return model.apply, (variables, X)


# -- 2. An NNX module --------------------------------------------------------------------------------------------------


class NnxBlock(nnx.Module):
    """The same layer in NNX."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        h = tag(self.up(self.norm(x)), "up")
        return x + self.down(nnx.gelu(h))


class NnxModel(nnx.Module):
    """The same model in NNX; the layer's class is given again."""

    def __init__(self, layer: type[nnx.Module], rngs: nnx.Rngs):
        self.layers = nnx.List([layer(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return jnp.mean(x**2)


def nnx_module(spec: str = "save:up"):
    """The loss of the NNX model, its layers under a policy, and the arguments to call it with."""
    model = NnxModel(jremat.remat(NnxBlock, policies.get(spec)), nnx.Rngs(0))
    return NnxModel.__call__, (model, X)


# -- 3. A plain function -----------------------------------------------------------------------------------------------


def layer(weights, x):
    """The same layer as a function of its weights; no framework."""
    centred = x - x.mean(-1, keepdims=True)
    h = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
    h = tag(h @ weights["up"], "up")
    return x + jax.nn.gelu(h) @ weights["down"]


# One layer's weights, and those of all layers with a leading axis, as a scan over layers has them.
WEIGHTS = {
    "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), jnp.float32),
    "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), jnp.float32),
}
STACKED = {name: jax.ShapeDtypeStruct((LAYERS, *w.shape), w.dtype) for name, w in WEIGHTS.items()}


def function(spec: str = "save:up"):
    """The loss of a stack of the function, under a policy or a plan over layers, and its arguments."""
    run = jremat.stack(layer, policies.get(spec), num_layers=LAYERS)  # jremat.checkpoint(layer, policy) for one layer
    return lambda weights, x: jnp.mean(run(weights, x) ** 2), (STACKED, X)


# -- Your numbers ------------------------------------------------------------------------------------------------------


def numbers(title: str, model) -> None:
    """Print what each policy keeps, and what it recomputes."""
    print(f"\n{title}")
    for spec in SPECS:
        loss, args = model(spec)
        kept = jremat.residuals(loss, *args)  # of the forward function; exact, inside scans too
        work = jremat.flops(jax.value_and_grad(loss), *args)  # of a gradient, as a step computes it
        print(f"  {spec:8} keeps {kept.total_bytes / 2**20:6.1f} MiB, recomputes {work.recompute / work.model:6.1%}")


def misspelt() -> None:
    """Print what a misspelt name gives: an error, where plain JAX would say nothing and keep nothing."""
    print("\nA misspelt name")
    loss, args = function("save:upp")
    try:
        jax.eval_shape(jax.grad(loss), *args)
    except ValueError as error:
        print(f"  {error}")


def whole_step(policy):
    """The whole training step of a language model under a policy, and the shapes of its arguments: what a device must
    hold beside the layers counts too, the optimizer's state, the embedding and the logits among it."""
    run, optimizer = jremat.stack(layer, policy, num_layers=DEEP), optax.adamw(1e-3)

    def loss(parameters, tokens):
        x = run(parameters["layers"], parameters["embedding"][tokens])
        logits = x[:-1] @ parameters["embedding"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[1:]).mean()

    def step(parameters, moments, tokens):
        value, gradients = jax.value_and_grad(loss)(parameters, tokens)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return optax.apply_updates(parameters, updates), moments, value

    stacked = {name: jax.ShapeDtypeStruct((DEEP, *w.shape), w.dtype) for name, w in WEIGHTS.items()}
    parameters = {"embedding": jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32), "layers": stacked}
    moments = jax.eval_shape(optimizer.init, parameters)
    shapes = parameters, moments, jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    return jax.jit(step, donate_argnums=(0, 1)), shapes


def planned() -> None:
    """Print the best plan for a deeper model under a budget of bytes, and run a step of it."""
    found = jremat.plan(layer, WEIGHTS, X, num_layers=DEEP, hbm_bytes=BUDGET_BYTES, target="cpu", step=whole_step)
    print(f"\nThe best for {DEEP} layers under {BUDGET_BYTES / 2**20:.0f} MiB, the whole step counted")
    print("  " + str(found).replace("\n", "\n  "))
    step, shapes = whole_step(found.policy)
    parameters = jax.tree.map(lambda s: 0.02 * jax.random.normal(jax.random.key(0), s.shape, s.dtype), shapes[0])
    tokens = jax.random.randint(jax.random.key(1), (TOKENS,), 0, VOCABULARY)
    _, _, loss = step(parameters, optax.adamw(1e-3).init(parameters), tokens)
    print(f"  run: loss {loss:.3f}")


if __name__ == "__main__":
    numbers("Linen", linen)
    numbers("NNX", nnx_module)
    numbers("A plain function, stacked", function)
    misspelt()
    planned()
