"""What processes say to each other.

messages.py  every message between processes, one line each: who sends it to whom, when
channel.py   framed messages over a socket, with their descriptors: a blocking end and an asyncio end
events.py    typed events, one JSON line each
"""
