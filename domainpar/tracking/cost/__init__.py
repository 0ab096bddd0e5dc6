"""Bytes and seconds of a training: pieces of events to be weighed, cuts, files for tables, and costs of an epoch.

Below the room of training, which forecasts its memory before the first step.
"""
