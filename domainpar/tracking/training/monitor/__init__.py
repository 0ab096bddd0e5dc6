"""Failures of training steps: non-finite values, diverging replicas, out-of-memory errors, stragglers.

An ordinary step pays for one norm of the parameters. Only the explanation of a failure takes time.
"""
