"""What to do next: pure functions of tables and numbers. No I/O, no clock, no torch.

sizing.py   how many KV blocks an engine gets
"""
