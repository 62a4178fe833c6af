"""The parts of ``scripts/explain.py``."""
