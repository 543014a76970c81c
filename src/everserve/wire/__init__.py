"""Communication between processes.

messages.py   every message between processes, one line each: sender, receiver, when it is sent
channel.py    framed messages over a socket, with their descriptors: a blocking end and an asyncio end
events.py     typed events, one JSON line each
event_log.py  the files that they are written to
"""
