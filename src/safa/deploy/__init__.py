"""The protocol on real devices: what travels, who sent it, whether it is taken, and the keys of a trial.

`wire`, `screening`, `roster` and `keys` know nothing of Flower. They are driven by the edge that does.
"""
