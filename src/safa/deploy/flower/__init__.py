"""Flower's edge: the apps that Flower runs, and the gates before its SuperLink and SuperNodes."""
