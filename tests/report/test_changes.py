"""Two policies side by side."""

import jax.numpy as jnp

import policies
from jremat.policy import tag
from jremat.report.changes import changes
from jremat.report.explain import explain


def mlp(x, w, v):
    return jnp.sin(tag(x @ w, "up")) @ tag(v * 2, "twice")


ARGS = jnp.ones((8, 4)), jnp.ones((4, 16)), jnp.ones((16, 4))


def test_what_changes_is_told_with_both_fates_and_the_difference():
    before, after = (explain(mlp, *ARGS, policy=policies.get(spec)) for spec in ("save:up", "full"))
    found = {change.value: change for change in changes(before, after) if change.differs}
    assert set(found) == {"up"}
    up = found["up"]
    assert (str(up.before), str(up.after)) == ("kept", "again")
    assert up.after.held_bytes - up.before.held_bytes == -4 * 8 * 16
    assert up.after.recompute_flops - up.before.recompute_flops == 2 * 8 * 4 * 16


def test_the_differences_sum_to_the_difference_of_the_sums():
    before, after = (explain(mlp, *ARGS, policy=policies.get(spec)) for spec in ("none", "offload:up"))
    found = changes(before, after)
    held = sum(change.after.held_bytes - change.before.held_bytes for change in found)
    assert held == after.offloaded_bytes + after.kept_bytes - before.kept_bytes
    again = sum(change.after.recompute_flops - change.before.recompute_flops for change in found)
    assert again == after.recompute_flops - before.recompute_flops


def test_equal_policies_change_nothing():
    one = explain(mlp, *ARGS, policy=policies.get("full"))
    assert not any(change.differs for change in changes(one, one))
