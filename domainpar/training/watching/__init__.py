"""Watching over training steps: what is not finite and where, replicas that drift, memory that is out, stragglers.

An ordinary step pays for one norm of the parameters. Whoever explains a failure may take its time.
"""
