"""The decoder-only transformer in plain JAX: what ``models`` trains and what an estimate traces.

It stands in the wheel so that a config can be estimated without the checkout; Flax's modules in ``models`` call it, so
there is one program, not two that must agree.
"""
