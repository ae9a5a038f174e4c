"""Alarms: conditions of a training run that somebody should look at, detected in the figures of its steps.

A rule (`rules/`) is pure: the figures of the steps so far go in, one measurement comes out. `watch.py` makes of the
measurements one alarm when a condition begins and one when it is over; `alarms.py` holds the rules of a run.
"""
