"""What kernels note when they begin (ops/timeline.py), in words of 64 bits: below the time in ns, above what it was.

This module needs neither torch nor triton: notes are read elsewhere, too.
"""

TIME_BITS = 52
KERNEL, PRODUCT, CHOOSE, COLLECT, SENT, ANSWERED, STEP, REPORT = range(8)
CHOSEN = 64  # plus the call
