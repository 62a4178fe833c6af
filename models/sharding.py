"""Where parameters and activations lie on a mesh: logical axes, and rules from these to the mesh's axes.

The mesh has four axes: ``data`` replicas, ``fsdp`` (a shard of the batch and of the state each), ``context`` and
``tensor``. Activations are constrained where ``jremat.estimator.decoder`` names their axes; parameters are placed by
their names, and XLA puts the collectives in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jremat.estimator.config import TransformerConfig
from jremat.estimator.parallel import Parallel

MESH_AXES = ("data", "fsdp", "context", "tensor")
"""From the slowest links to the fastest: neighbouring devices share ``tensor``."""

_HEADS, _WIDTH = ("heads", "head_dim"), ("mlp",)
_EMBED, _KV = ("embed",), ("kv_heads", "head_dim")
# Axes of a matmul's kernel: those that it sums over and those that it makes, which its bias has too.
_KERNELS = {
    "query": (_EMBED, _HEADS),
    "key": (_EMBED, _KV),
    "value": (_EMBED, _KV),
    "attn_proj": (_HEADS, _EMBED),
    "mlp_gate": (_EMBED, _WIDTH),
    "mlp_up": (_EMBED, _WIDTH),
    "mlp_out": (_WIDTH, _EMBED),
}
_TABLES = {
    "token_embedding": ("vocab", "embed"),
    "position_embedding": ("position", "embed"),
    "head": ("vocab", "embed"),
}
_LAYERS = "layers"  # a scan slices this axis at each turn, so it is never sharded


def logical_axes(names: Sequence[str]) -> tuple[str, ...]:
    """Logical axes of a parameter, from the names on its path.

    Args:
        names: such as ``("blocks", "query", "kernel")``; what stands before a parameter's own path, as in the
            optimizer's state, is ignored.

    >>> logical_axes(("blocks", "query", "kernel")), logical_axes(("0", "mu", "head"))
    (('layers', 'embed', 'heads', 'head_dim'), ('vocab', 'embed'))
    """
    if names[-1] in _TABLES:
        return _TABLES[names[-1]]
    layers = (_LAYERS,) if "blocks" in names else ()
    if len(names) > 1 and names[-2] in _KERNELS:
        inputs, outputs = _KERNELS[names[-2]]
        return layers + (inputs + outputs if names[-1] == "kernel" else outputs)
    return (*layers, "embed")  # of a norm


@dataclass(frozen=True)
class Sharding:
    """A step spread over a mesh.

    Tensor parallelism splits heads, MLP width and vocabulary (Shoeybi et al. 2019, arXiv 1909.08053); with
    ``sequence`` the residual stream between them too (Korthikanti et al. 2022, arXiv 2205.05198). Under ``context``
    queries stay apart and keys and values are gathered where attention reads them. Of each parameter ``fsdp`` shards
    the longest axis that tensor parallelism leaves and that divides; so does ZeRO-1 of the optimizer's state, and
    ZeRO-2 of the gradients, over the replicas (Rajbhandari et al. 2020, arXiv 1910.02054).

    Args:
        parallel: degrees; no pipeline.

    Raises:
        ValueError: a pipeline.

    >>> sharding = Sharding(Parallel(fsdp=2, tensor=4))
    >>> tuple(sharding.spec(("blocks", "mlp_up", "kernel"), (12, 768, 3072)))
    (None, 'fsdp', 'tensor')
    """

    parallel: Parallel

    def __post_init__(self) -> None:
        if self.parallel.pipeline > 1:
            raise ValueError("mesh: pipeline is for estimates alone; no stages are run")

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self.parallel, axis) for axis in MESH_AXES)

    @cached_property
    def mesh(self) -> AbstractMesh:
        """The mesh without devices."""
        return AbstractMesh(self._sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))

    def on(self, devices: Sequence[jax.Device]) -> Mesh:
        """The mesh of these devices, laid out for their links.

        Raises:
            ValueError: too few.
        """
        wanted = self.parallel.devices
        if len(devices) < wanted:
            cpu = devices[0].platform == "cpu"
            cure = f"; XLA_FLAGS=--xla_force_host_platform_device_count={wanted} makes a CPU so many" if cpu else ""
            raise ValueError(f"mesh: {self.parallel} takes {wanted} devices, here are {len(devices)}{cure}")
        auto = (AxisType.Auto,) * len(MESH_AXES)
        return jax.make_mesh(self._sizes, MESH_AXES, axis_types=auto, devices=devices[:wanted])

    @cached_property
    def rules(self) -> tuple[tuple[str, Any], ...]:
        """Flax's: the mesh axes of each logical one."""
        stream = ("context", "tensor") if self.parallel.sequence else "context"
        split_by_tensor = [(name, "tensor") for name in ("heads", "kv_heads", "mlp", "vocab")]
        return ("batch", ("data", "fsdp")), ("length", "context"), ("stream_length", stream), *split_by_tensor

    def constrain(self, x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
        """x, laid out by its logical axes; an axis without a rule is whole."""
        mesh: Any = self.mesh  # Flax's annotation knows of meshes with devices alone
        return nn.with_logical_constraint(x, axes, rules=self.rules, mesh=mesh)

    @property
    def batch(self) -> P:
        """Of an array whose first axis is the batch."""
        return P(("data", "fsdp"))

    def spec(self, names: Sequence[str], shape: Sequence[int], role: str = "weights") -> P:
        """Of a parameter, or of what the optimizer holds of one.

        Args:
            names: on its path.
            shape: its own.
            role: ``weights``, ``gradients`` or ``optimizer state``.
        """
        if not shape:
            return P()
        axes = logical_axes(names)
        placed: list[Any] = list(nn.logical_to_mesh_axes(axes, self.rules) or ())
        shards = self.parallel.shards(role)
        free = [i for i, axis in enumerate(axes) if axis != _LAYERS and not placed[i] and shape[i] % shards == 0]
        if shards > 1 and free:
            over = tuple(axis for axis in ("data", "fsdp") if axis == "fsdp" or shards > self.parallel.fsdp)
            used = tuple(axis for axis in over if getattr(self.parallel, axis) > 1)
            placed[max(free, key=lambda i: shape[i])] = used if len(used) > 1 else used[0]
        return P(*placed)

    def tree(self, params: Any, role: str = "weights", mesh: Mesh | None = None) -> Any:
        """``NamedSharding`` of each leaf of a tree of parameters, or of an optimizer's state.

        Args:
            params: arrays or ShapeDtypeStructs.
            role: as of ``spec``.
            mesh: with devices; None: without.
        """

        def one(path: Any, leaf: Any) -> NamedSharding:
            names = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path]
            return NamedSharding(mesh or self.mesh, self.spec(names, leaf.shape, role))

        return jax.tree_util.tree_map_with_path(one, params)

    def constrain_tree(self, tree: Any, role: str) -> Any:
        """A tree of parameters, gradients or the optimizer's state, laid out by its role."""
        return jax.lax.with_sharding_constraint(tree, self.tree(tree, role))

    def check(self, config: TransformerConfig, batch: int, seq: int) -> None:
        """Refuse a mesh that doesn't divide the model or the batch, and name the nearest that does.

        Args:
            config: the model's.
            batch: sequences of a micro-batch.
            seq: tokens of a sequence.

        Raises:
            ValueError: the first degree that doesn't divide what it splits.
        """
        p = self.parallel
        if p.context > 1 and config.attention == "cudnn":
            raise ValueError("mesh: context splits queries, which cudnn's attention takes whole; use blockwise or dot")
        try:
            p.check(config, batch, seq)
        except ValueError as error:
            near = self._nearest(config, batch, seq)
            hint = "" if near is None else f"; nearest mesh that does: {near}"
            raise ValueError(f"mesh: {error}{hint}") from None
        size = config.vocab_size
        if size % p.tensor:
            padded = -(-size // p.tensor) * p.tensor
            raise ValueError(
                f"mesh: tensor: expected a divisor of vocab_size={size}, got {p.tensor}; pad it to {padded}"
            )

    def _nearest(self, config: TransformerConfig, batch: int, seq: int) -> Parallel | None:
        """The mesh of most devices whose every degree divides this one's and what it splits."""
        p, found = self.parallel, []
        divisors = lambda n: [k for k in range(1, n + 1) if n % k == 0]
        for data in divisors(p.data):
            for fsdp in divisors(p.fsdp):
                for tensor in divisors(p.tensor):
                    for context in divisors(p.context):
                        near = Parallel(
                            data=data,
                            fsdp=fsdp,
                            zero=p.zero if data > 1 else 0,
                            tensor=tensor,
                            sequence=p.sequence and tensor > 1,
                            context=context,
                        )
                        try:
                            near.check(config, batch, seq)
                        except ValueError:
                            continue
                        found.append(near)
        return max(found, key=lambda near: near.devices, default=None)
