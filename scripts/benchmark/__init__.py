"""What ``scripts/bench.py`` is made of."""
