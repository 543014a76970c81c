"""The ledger: memory that outlives a gateway, and from which its successor goes on with every connection and request.

layout.py       what a ledger has room for, and where things are in it
pages.py        chains of pages: bytes that grow at one end and are dropped at the other
connections.py  one connection: what it has received (inbox), what it is to be sent (ring), and how far that is (commit)
requests.py     one request that generates: its journal, from which its answer can be written again
ledger.py       all of it, and what one gateway leaves to the next
writer.py       events of plain streams, written by csrc/writer.c
sockets.py      what the kernel knows of a connection: its cookie, and how many bytes went in and out

The rules by which nothing is lost and nothing is sent twice, whichever instruction a gateway dies at:

1. A byte is given to the kernel only when a committed ring holds it.
2. A commit says in one piece how far the ring goes, how much of the answer that is, and where in the inbox the request
   begins. There are two copies: one is valid while the other is written.
3. What was received and what was sent is asked from the kernel, when no gateway runs; it is not written down.
4. A token is in its request's journal before any text is made of it. One that is not there is asked for again.
5. What is random or timed in an answer is in the journal before anything of the answer is in a ring.

One process writes at a time. The memory is not protected against that process' bugs, only against its death.
"""
