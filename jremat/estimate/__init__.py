"""Closed form: what a training run needs, from a config alone, without a trace."""
