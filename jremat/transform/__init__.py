"""Make it happen: remat of functions, Linen and NNX modules, and stacks of layers."""
