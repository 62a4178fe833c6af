"""The parts of ``scripts/train.py``, one idea a file."""
