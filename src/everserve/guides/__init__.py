"""Guided streams: which tokens a grammar allows next.

    grammar text --compile--> Compiled --begin(known)--> Guide --advance(token)--> mask --advance(token)--> mask ...

What a stream may say next is a function of (grammar, its output tokens) and of nothing else. So a guide is no state
that has to be saved: the worker that takes a stream over compiles the grammar, which is in the request, feeds it the
tokens that the client has, and goes on with the same masks, bit for bit. That holds for one version of the library, so
gateway and workers compare versions when they meet.

vocabulary.py   a model's tokens, as the library wants them
compiling.py    grammar text -> Compiled, within limits; and `Compiler`, which remembers what it has compiled
guide.py        the guide of one stream; masks are computed by a thread, beside the forward pass

The gateway compiles each grammar once before it accepts a request (gateway/text/grammars.py), in a process of its own:
what could take too long, or end the process that compiles it, never reaches a worker.
"""
