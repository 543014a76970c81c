"""The orchestrator: which process holds which seat, which workers are lost, and which tables are published.

Five rooms; imports point from the lower ones to the upper ones:

decide/     the machine: inputs and the time in, effects and a reason out. No I/O
hold/       what workers are made of and keep: memory, channels, lanes, and how a worker is started
watch/      deaths, silences and the health of devices become inputs
tell/       what the gateway, the event log and operators are told
run/        the process around the machine: what is said goes in, effects become messages
"""
