"""The parts of ``scripts/compare_torch.py``."""
