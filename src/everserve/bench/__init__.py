"""Benchmarks, one file per question. Each prints a table and writes JSON with commit, hardware and configuration.

engine.py   is one worker fast, next to what people would use instead?
baseline.py transformers, measured in a process of its own
shapes.py   model directories with random weights, of any shape
report.py   where and with what it ran; tables and files
"""
