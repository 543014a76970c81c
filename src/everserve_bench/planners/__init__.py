"""Planners of others, beside ours, by arithmetic.

reshard.py   what moves when a sharded model loses a device: continuous, greedy, a full reload, and ours
"""
