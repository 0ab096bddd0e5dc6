"""How many ranks, in which grid: a machine described or measured, the work of a network, and what they make together.

Nothing is trained: predictions come from pieces of one event, and from the sizes of all others.
"""
