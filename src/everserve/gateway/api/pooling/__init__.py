"""What a decoder model says of a text without writing one: embeddings, and how near texts are to each other.

A prompt's vector is its last token's hidden state after the final norm (`SamplingParams.pooled`). Nothing of an answer
is sent before all of it is there, and it is a function of the request: so the next gateway simply answers again.

routes.py     embeddings, score, rerank
request.py    the fields, in vLLM's names
pool.py       the streams of one request
view.py       answers, as clients see them
"""
