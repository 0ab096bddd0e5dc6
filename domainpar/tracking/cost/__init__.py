"""Seconds, bytes and joules of a training: weighed on pieces of an event, predicted for any ranks, measured.

Below the room of training, which asks for its memory before the first step, and for the grid where that was left open.
"""
