"""Seconds, bytes and joules of a training: weighed on pieces of an event, predicted on cores, measured.

Below the room of training, which asks for its memory before the first step.
"""
