"""The pieces of `verify`: a model run whole and split, what its layers saw, and where the two first differ."""
