"""Frozen results: rounds and models of many small runs, which a change of the code must not change."""
