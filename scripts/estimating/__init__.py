"""The parts of ``scripts/estimate.py``."""
