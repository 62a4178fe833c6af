"""``python -m policies.dictionaries.pytorch`` prints docs/from-pytorch.md: PyTorch's lines in our words."""

from policies import registry
from policies.dictionaries.markdown import code, printed, table
from policies.entry import Entry
from policies.torch_expression import SAC_KEEPS, SAC_RERUNS, NotExpressible, line_of

HEAD = f"""# From PyTorch

Your line in PyTorch, the spec here, and what differs. This page is made from the zoo itself by
`python -m policies.dictionaries.pytorch > docs/from-pytorch.md`; `scripts/compare_torch.py` measures both sides of each
line.

What differs everywhere:

| PyTorch | here |
|---|---|
| {SAC_KEEPS} | a policy permits; what the backward never reads, such as a block's last matmul, is not kept |
| {SAC_RERUNS} (until it stops early) | what nothing needs is not in the recompute: dead code goes |
| early stop: a replay ends when the last value asked for is there; `early_stop=False` runs all of it | nothing to set |
| `preserve_rng_state` saves and restores the generators; without it a replay draws other dropout masks | keys are \
inputs: a replay draws the same masks whatever happens |
| `use_reentrant=True`: parameters get no gradient where no input of the block needs one | one kind of remat; every \
gradient that is asked for comes |
| a block with side effects (BatchNorm's statistics, a counter) runs them again in the replay | collections are \
outputs, written once |
| a replay that computes something else passes, where shapes agree | functions are pure; `jremat.replay` compares |
| torchtitan's every second `mm` counts calls, and shifts with a new matmul | by name: `torchtitan_selective_op` |
| a tensor has no name: SAC sees an op, its arguments and your counter | `tag(x, "mlp_up")`, then `save:mlp_up` |
| `checkpoint_sequential(layers, n, x)` leaves the last chunk without a checkpoint | `mix:` says which layers |
| `torch.compile` has its partitioner drop what the backward never reads | as here, without compiling |

`SAC [ops]` below is `checkpoint(block, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts,
[ops]))`; where it says what makes a tensor, a function in the list's place that counts the calls of each op.

"""

# Lines that are no policy of the zoo's own, with the spec that does the same.
OTHERS = (
    (
        "checkpoint(block, x, use_reentrant=True)",
        "full",
        "the whole block is rerun there; frozen inputs stop gradients",
    ),
    (
        "checkpoint_sequential(layers, 2, x, use_reentrant=False)",
        "mix:N*every_k:N,rest*none",
        "N = len(layers) // 2; the last chunk is bare",
    ),
    (
        "SAC [mm, addmm]",
        "sac:mm,addmm",
        "mm and addmm are one family here: no matmul has a bias in it",
    ),
    (
        "CheckpointPolicy.MUST_SAVE or PREFER_SAVE from a function of your own",
        "save:NAME or ops:FAMILY",
        "the two differ there under torch.compile alone; there is one here",
    ),
    ("CheckpointPolicy.MUST_CPU_OFFLOAD", "offload:NAME", "eager PyTorch recomputes it; here it goes to the host"),
    ("torch.compile(model)", "overhead:SHARE", "min-cut keeps what is cheap to keep; here the share is yours to set"),
    ("model.gradient_checkpointing_enable()", "full", "Hugging Face: each layer in a checkpoint of its own"),
)


def page() -> str:
    """The whole page."""
    others = [(code(line), code(spec), differs) for line, spec, differs in OTHERS]
    return HEAD + table(("your line there", "here", "what differs"), [*others, *map(_row, registry.table())]) + "\n"


def _row(entry: Entry) -> tuple[str, str, str]:
    spec = code(entry.policy.spec) + (f", of the form {code(entry.spec)}" if entry.is_form else "")
    try:
        line, differs = line_of(entry.policy)
    except NotExpressible as error:
        return "not expressible", spec, str(error)
    return code(line), spec, differs or "nothing"


if __name__ == "__main__":
    printed(page, "policies.dictionaries.pytorch")
