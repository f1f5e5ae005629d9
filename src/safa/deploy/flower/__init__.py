"""Flower's edge: the apps that Flower runs, and the programs around its SuperLink and its SuperNodes."""
