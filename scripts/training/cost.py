"""What a step costs and what the device could do: model FLOPs, the peak that MFU is a share of, compiled bytes."""

from dataclasses import dataclass, replace

import jax

from jremat.estimator.config import TransformerConfig
from jremat.estimator.hardware import chip_of
from jremat.measure import PeakFlops, peak_of


@dataclass(frozen=True)
class ModelFlops:
    """Model FLOPs of one step under the two ways of counting causal attention.

    Args:
        full: every score counted, as PaLM, nanoGPT and torchtitan do.
        half: a causal mask's half of them, as Megatron and MaxText (since July 2025) do.
    """

    full: int
    half: int


def model_flops(config: TransformerConfig, tokens: int, seq: int) -> ModelFlops:
    """Model FLOPs of a gradient over ``tokens`` tokens in sequences of ``seq``; recompute is not in it.

    6 for every matmul parameter and token, 2 forward and 4 backward (Kaplan et al. 2020, arXiv 2001.08361, section
    2.1), and 12·L·n·d·s for attention's two matmuls (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

    >>> from models.config import get
    >>> gpt2 = model_flops(get("gpt2"), tokens=1024, seq=1024)
    >>> round(gpt2.full / 1e9), round(gpt2.half / 1e9)
    (875, 817)
    """
    c = config
    kernels = (
        c.hidden * c.head_dim * (c.heads + 2 * c.kv_heads)  # query, key, value
        + c.heads * c.head_dim * c.hidden  # output projection
        + (3 if c.mlp == "swiglu" else 2) * c.hidden * c.mlp_hidden
    )
    weights = 6 * tokens * (c.num_layers * kernels + c.vocab_size * c.hidden)
    attention = 12 * tokens * c.num_layers * c.heads * c.head_dim * seq
    return ModelFlops(weights + attention, weights + attention // 2)


def matmul_peak(compute_dtype: str) -> PeakFlops:
    """What MFU is measured against: the default device's peak in the table of chips, or a matmul measured now."""
    device = jax.local_devices()[0]
    peak = peak_of(device, compute_dtype)
    if chip_of(device.device_kind) is None:
        return replace(peak, source=f"a {compute_dtype} matmul measured on this {device.device_kind} at the start")
    return replace(peak, source=f"the {compute_dtype} peak of {peak.source}")


@dataclass(frozen=True)
class StepBytes:
    """What the compiler says a program holds at its peak. Compiled, not measured."""

    temp: int
    argument: int
    output: int
    alias: int

    @property
    def peak(self) -> int:
        """Temporaries, arguments and outputs, what is donated counted once."""
        return self.temp + self.argument + self.output - self.alias


def step_bytes(compiled: jax.stages.Compiled) -> StepBytes:
    """The memory of a compiled program, from its own analysis."""
    memory = compiled.memory_analysis()
    assert memory is not None, "a backend that runs programs also says what they hold"
    return StepBytes(
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
    )
