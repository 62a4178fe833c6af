"""Everything that is checked before anything is written or compiled."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jremat
import policies
from jremat.estimator.config import TransformerConfig
from jremat.estimator.parallel import Parallel, read_mesh
from jremat.graph import Flops
from jremat.measure.memory import UNDONE, undone_on_cpu
from jremat.policy import Policy
from jremat.policy.files import check_file, probe
from jremat.terminal.tables import human
from models.config import get
from models.remat import Remat, resolved
from models.sharding import Sharding
from models.transformer import Transformer, block_apply, init_params
from scripts.training import snapshots
from scripts.training.architecture import architecture
from scripts.training.config import Run
from scripts.training.data import Batches, open_corpus
from scripts.training.files import Files, default_out, read_description
from scripts.training.lint import findings
from scripts.training.optimizer import optimizer
from scripts.training.own import Own, changes
from scripts.training.snapshots import Snapshot
from scripts.training.step import State, initial_state, placed, train_step


@dataclass(frozen=True)
class Job:
    """A run whose every part has been checked.

    Args:
        run: the flags.
        config: the model's.
        batches: the text.
        remat: what the layers run under.
        model: the transformer under it.
        optimizer: AdamW as the flags say.
        step: the traced train step, not compiled yet.
        counted: its matmul FLOPs, what remat does again among them.
        files: where everything will be written.
        description: what must stay the same when the run is resumed.
        tokens, state: shapes of the step's arguments, with their shardings.
        resumed: the snapshot to go on from, or None.
        changed: flags that differ from the resumed run's own, for people.
        notes: what to know of the compiled memory, a sentence each.
        warnings: for the user, one line each.
    """

    run: Run
    config: TransformerConfig
    batches: Batches
    remat: Remat
    model: Transformer
    optimizer: optax.GradientTransformation
    step: jax.stages.Lowered
    counted: Flops
    files: Files
    description: Mapping[str, Any]
    tokens: jax.ShapeDtypeStruct
    state: State
    resumed: Snapshot | None
    changed: tuple[str, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def devices(self) -> int:
        """That the step is spread over."""
        return 1 if self.model.sharding is None else self.model.sharding.parallel.devices

    @property
    def first(self) -> int:
        """Steps that are done already."""
        return 0 if self.resumed is None else self.resumed.step

    def initial(self) -> State:
        """The state to start from: fresh, or the snapshot's."""
        if self.resumed is not None:
            return self.resumed.state
        where = None if self.model.sharding is None else jax.tree.map(lambda leaf: leaf.sharding, self.state)
        return jax.jit(_maker(self.config, self.optimizer, self.run.seed), out_shardings=where)()


def prepare(run: Run, own: Own) -> Job:
    """Check the flags, the text, the policy, the snapshot and the disk, in that order, and trace the step.

    Args:
        run: the flags.
        own: those of the run that is resumed.

    Raises:
        ValueError: the first thing that is wrong, in a line for people. Nothing has been written.
        OSError: a file of the run can't be read.
    """
    run.check()
    corpus = open_corpus(run.text.data)
    vocab_size = run.text.vocab_size or corpus.vocabulary(get(run.model.model).vocab_size)
    config = architecture(run.model, vocab_size, jax.default_backend())
    if run.text.seq > config.max_seq:
        longest = f"{config.max_seq}, the model's longest sequence (--max-seq raises it)"
        raise ValueError(f"seq: expected at most {longest}, got {run.text.seq}")
    if config.attention == "cudnn" and jax.default_backend() != "gpu":
        raise ValueError(f"attention: cudnn needs an NVIDIA GPU, this runs on {jax.default_backend()}; use blockwise")
    batches = Batches(corpus, run.text.seq, run.seed)
    batches.check(config.vocab_size)
    sharding = _sharding(run, config)
    tokens = jax.ShapeDtypeStruct((run.text.accumulate, run.text.micro_batch, run.text.seq + 1), jnp.int32)
    adamw = optimizer(run)
    state = jax.eval_shape(_maker(config, adamw, run.seed))
    if sharding is not None:
        mesh = sharding.on(jax.devices())
        state = placed(state, sharding, mesh)
        rows = NamedSharding(mesh, P(None, *sharding.batch))
        tokens = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=rows)

    def whole(chosen: Remat) -> tuple[Any, tuple[Any, Any]]:
        return jax.jit(train_step(chosen.model(config, sharding), adamw, run.seed), donate_argnums=0), (state, tokens)

    chosen = resolved(
        policies.get(run.policy), config, run.text.micro_batch, run.text.seq, run.stack,
        target="local" if sharding is None else f"localx{sharding.parallel.devices}",
        step=whole, block=block_apply(config, sharding=sharding),
    )  # fmt: skip

    described = _description(run, config, batches)
    files = Files(run.out or default_out(run.model.model, run.policy))
    resumed, warnings = _resumed(files, described, own, state) if run.resume else _unused(files)
    if resumed is not None and resumed.step > run.steps:
        raise ValueError(f"steps: the snapshot {resumed.path} has {resumed.step} already, got {run.steps}")

    if isinstance(chosen.policy, Policy) and chosen.policy.offloads and jax.default_backend() == "cpu":
        warnings.append(f"policy: {run.policy!r} moves values to the host's memory, where a CPU keeps them already")

    used = 1 if sharding is None else sharding.parallel.devices
    if used < jax.device_count() and jax.default_backend() != "cpu":
        warnings.append(
            f"mesh: {used} of {jax.device_count()} devices is used; --mesh fsdp={jax.device_count()} uses all"
        )

    model = chosen.model(config, sharding)
    _check_disk(files.out, _num_bytes(state))
    check_file("json", run.json)
    step = train_step(model, adamw, run.seed)
    traced = jax.jit(step, donate_argnums=0).trace(state, tokens)
    undone = jax.default_backend() == "cpu" and undone_on_cpu(traced.jaxpr)
    counted = jremat.flops(step, *jax.tree.map(_bare, (state, tokens)))
    warnings += findings(model, state.params, run.text.micro_batch, run.text.seq, run.seed)
    return Job(
        run=run,
        config=config,
        batches=batches,
        remat=chosen,
        model=model,
        optimizer=adamw,
        step=traced.lower(),
        counted=counted,
        files=files,
        description=described,
        tokens=tokens,
        state=state,
        resumed=resumed,
        changed=tuple(changes(own.flags, run)) if own.flags else (),
        notes=(UNDONE,) if undone else (),
        warnings=tuple(warnings),
    )


def _maker(config: TransformerConfig, adamw: optax.GradientTransformation, seed: int) -> Any:
    def make() -> State:
        return initial_state(init_params(config, jax.random.key(seed)), adamw)

    return make


def _sharding(run: Run, config: TransformerConfig) -> Sharding | None:
    """How the step is spread; without a flag over all processes by data, or not at all."""
    alone = jax.process_count() == 1
    if not run.mesh and alone:
        return None
    parallel = read_mesh(run.mesh) if run.mesh else Parallel(data=jax.device_count())
    if parallel.devices == 1 and alone:
        return None
    if not alone and parallel.devices != jax.device_count():
        raise ValueError(
            f"mesh: {parallel} takes {parallel.devices} devices, the {jax.process_count()} processes have "
            f"{jax.device_count()}; each must have a part"
        )
    sharding = Sharding(parallel)
    sharding.on(jax.devices())  # too few devices, before what they would have to divide
    sharding.check(config, run.text.micro_batch, run.text.seq)
    return sharding


def _description(run: Run, config: TransformerConfig, batches: Batches) -> Mapping[str, Any]:
    """What decides a run's losses: the policy and how a batch is cut into micro-batches are not in it."""
    return {
        "model": config.to_dict(),
        "optimizer": asdict(run.optimizer) | {"warmup_steps": run.warmup_steps, "decay_steps": run.decay_steps},
        "seed": run.seed,
        "seq": run.text.seq,
        "batch": run.batch,
        "data": batches.corpus.fingerprint,
    }


def _unused(files: Files) -> tuple[None, list[str]]:
    if files.out.exists() and not files.out.is_dir():
        raise ValueError(f"out: expected a folder, got a file: {files.out}")
    if files.holds_a_run:
        raise ValueError(f"out: {files.out} holds a run already; go on with it by --resume, or choose another folder")
    return None, []


def _resumed(files: Files, described: Mapping[str, Any], own: Own, state: State) -> tuple[Snapshot | None, list[str]]:
    if not files.out.is_dir():
        raise ValueError(f"resume: no such run: {files.out}")
    files.check()
    snapshot, warnings = snapshots.newest(files.snapshots, state, described)
    if snapshot is not None:
        saved: Mapping[str, Any] | None = snapshot.description
    else:
        saved = _described(files.description)
        if saved is None and any(files.out.iterdir()) and not files.holds_a_run:
            raise ValueError(f"resume: {files.out} holds no run")
        warnings.append(f"no whole snapshot in {files.out}: starting from the first step")
    differing = [] if saved is None else snapshots.differences(saved, described)
    if differing:
        unread = f"; its own flags can't be read ({own.fault}), so pass them all" if own.fault else ""
        raise ValueError(f"resume: {files.out} is another run: {'; '.join(differing)}{unread}")
    if own.fault:
        warnings.append(f"the run's own flags can't be read ({own.fault}); those of the command line are taken")
    return snapshot, warnings


def _described(path: Path) -> Mapping[str, Any] | None:
    try:
        return read_description(path)
    except (FileNotFoundError, ValueError):  # a damaged one is reported where it is written anew
        return None


def _check_disk(out: Path, needed: int) -> None:
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    try:
        probe(there)
        free = shutil.disk_usage(there).free
    except OSError as error:
        raise ValueError(f"out: cannot write in {there}: {error.strerror}") from error
    if free < needed:
        raise ValueError(f"out: a snapshot needs {human(needed)}, {there} has {human(free)} free")


def _bare(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _num_bytes(state: State) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
