"""The model against a numpy one written apart."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from tests.models.families import (
    FAMILIES,
    GPT,
    LLAMA,
    TARGETS,
    TOKENS,
    assert_same_gradients,
    compiled,
    value_and_grad,
)

families = pytest.mark.parametrize("family", FAMILIES)


def in_numpy(config, params, tokens):
    """The whole model in float64, layer by layer and head by head."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    softmax = lambda x: (
        np.exp(x - x.max(-1, keepdims=True)) / np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)
    )

    def norm(p, x):
        if config.norm == "rmsnorm":
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * p["scale"]
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + config.norm_eps) * p["scale"] + p[
            "bias"
        ]

    def project(p, x):
        return np.tensordot(x, p["kernel"], 1) + p.get("bias", 0)

    def turn(x):  # [s, n, d]
        half = config.head_dim // 2
        angles = np.arange(len(x))[:, None] * config.rope_theta ** (-np.arange(half) / half)
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
        return np.concatenate([z.real, z.imag], -1)

    def attend(p, x):
        q, k, v = (project(p[name], x) for name in ("query", "key", "value"))  # [s, n, d]
        if config.positions == "rope":
            q, k = turn(q), turn(k)
        k, v = (np.repeat(t, config.group, axis=1) for t in (k, v))
        heads = []
        for i in range(config.heads):
            scores = q[:, i] @ k[:, i].T / np.sqrt(config.head_dim)
            scores[np.triu_indices(len(x), 1)] = -np.inf
            heads.append(softmax(scores) @ v[:, i])
        return np.einsum("nsd,ndh->sh", heads, p["attn_proj"]["kernel"]) + p["attn_proj"].get("bias", 0)

    def mlp(p, x):
        up = project(p["mlp_up"], x)
        if config.mlp == "swiglu":
            gate = project(p["mlp_gate"], x)
            return project(p["mlp_out"], gate / (1 + np.exp(-gate)) * up)
        return project(p["mlp_out"], 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3))))

    def one(row):
        x = params["token_embedding"][row]
        if config.positions == "learned":
            x = x + params["position_embedding"][: len(row)]
        for i in range(config.num_layers):
            p = jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"])
            x = x + attend(p, norm(p["attn_norm"], x))
            x = x + mlp(p, norm(p["mlp_norm"], x))
        return norm(params["final_norm"], x) @ params.get("head", params["token_embedding"]).T

    return np.stack([one(row) for row in np.asarray(tokens)])


def logits(config, params, tokens=TOKENS, key=None):
    return compiled(models.Transformer(config).apply)({"params": params}, tokens, key)


@families
@pytest.mark.parametrize("attention", ["dot", "blockwise"])
def test_equals_a_model_in_numpy(params, family, attention):
    config = replace(FAMILIES[family], attention=attention)
    want = in_numpy(config, params[family], TOKENS)
    np.testing.assert_allclose(logits(config, params[family]), want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@families
def test_dot_and_blockwise_have_the_same_gradients(params, family):
    kinds = [replace(FAMILIES[family], attention=attention) for attention in ("dot", "blockwise")]
    assert_same_gradients(*(value_and_grad(config, params[family])[1] for config in kinds))


@families
@pytest.mark.parametrize("attention", ["dot", "blockwise"])
def test_a_later_token_changes_no_earlier_logits(params, family, attention):
    config = replace(FAMILIES[family], attention=attention)
    before = logits(config, params[family])
    after = logits(config, params[family], TOKENS.at[:, 5].set((TOKENS[:, 5] + 1) % 13))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (np.abs(before[:, 5:] - after[:, 5:]).max(-1) > 1e-4).all()


def test_grouped_queries_equal_repeated_keys_and_values(params):
    wide = jax.tree.map(lambda x: x, params["llama"])
    for name in ("key", "value"):
        wide["blocks"][name] = {"kernel": jnp.repeat(wide["blocks"][name]["kernel"], LLAMA.group, axis=2)}
    got, want = logits(replace(LLAMA, kv_heads=4), wide), logits(LLAMA, params["llama"])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_bfloat16_compute_leaves_parameters_and_loss_in_float32(params, family):
    half = replace(FAMILIES[family], compute_dtype="bfloat16")
    (loss, grads), (exact, _) = (value_and_grad(config, params[family]) for config in (half, FAMILIES[family]))
    assert loss.dtype == jnp.float32 and {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(loss, exact, rtol=0.02)
    shape = jax.eval_shape(models.Transformer(half).apply, {"params": params[family]}, TOKENS)
    assert (shape.shape, shape.dtype) == ((2, 9, 13), jnp.bfloat16)


def test_a_chunked_loss_is_the_same_loss(params):
    model = models.Transformer(GPT)
    both = lambda p: [models.mean_loss(model, p, TOKENS, TARGETS, None, chunk) for chunk in (None, 4)]
    np.testing.assert_allclose(*compiled(both)(params["gpt"]), rtol=1e-6)


def test_out_of_range_tokens_and_lengths_are_not_taken_for_others(params):
    with pytest.raises(ValueError, match="tokens: expected at most max_seq=9 positions, got 10"):
        logits(GPT, params["gpt"], jnp.zeros((1, 10), jnp.int32))
    for token in (-1, 13):
        assert np.isnan(logits(GPT, params["gpt"], TOKENS.at[0, 0].set(token))[0, 0]).all()


def test_init_is_of_the_stated_scale():
    params = models.init_params(replace(models.get("tiny"), vocab_size=4096), jax.random.key(0))
    std = lambda x: float(jnp.std(x))
    np.testing.assert_allclose(std(params["token_embedding"]), 0.02, rtol=0.02)
    np.testing.assert_allclose(std(params["blocks"]["mlp_up"]["kernel"]), 0.02, rtol=0.02)
    np.testing.assert_allclose(std(params["blocks"]["mlp_out"]["kernel"]), 0.02 / np.sqrt(12), rtol=0.02)
    up = params["blocks"]["mlp_up"]["kernel"]
    assert not np.array_equal(up[0], up[1])
