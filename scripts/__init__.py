"""Command lines, one job each."""
