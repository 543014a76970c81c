"""How long a worker's main thread may be away before its warden stops pulsing for it.

detect_ms (tens of milliseconds) bounds how fast a stopped process is noticed: the warden, a thread that does nothing
else, stops pulsing with it. A process that runs while its main thread is stuck is noticed when the lease ends. The
lease is longer than any single step should take, and much longer than detect_ms.
"""

LEASE_S = 120.0
