"""Benchmarks: what they find in events and arrival times, their tables, their flags, and what is published."""
