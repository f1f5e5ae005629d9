"""Benchmarks: how fast clients are trained, and how costs grow. Measures on this machine, and decides nothing."""
