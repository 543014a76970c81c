"""NVIDIA devices without torch: memory that is handed over by descriptor, and processes that share a device.

driver.py   libcuda through ctypes: memory as descriptors, addresses, streams, waiting for a word
graphs.py   graphs that were captured one by one, launched as one
devices.py  which devices there are and how much memory they have, asked of a process that ends again
parting.py  what a worker leaves behind, so that its death harms nobody on its device
mps.py      the daemon through which several processes compute on one device at the same time
"""
