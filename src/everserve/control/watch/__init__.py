"""What happens to workers and devices becomes inputs of the machine.

detector.py         life words and pulses
health_sources.py   observations of devices: a file or a command; nvml.py: the driver of GPUs
"""
