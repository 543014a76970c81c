"""Text to tokens and back.

tokenizer.py        the model's tokenizer and chat template
tokenizer_files.py  ... as the files of the model describe them; the only importer of transformers
templates.py        messages -> the text of a prompt
chat_template.py    ... as a process of its own computes it
grammars.py         grammars of requests, compiled before a worker sees them
limited.py          processes that work on what clients send, within limits ...
limited_process.py  ... which run this
guiding.py          request -> what its answers must look like, and how they are read
structured.py       ... schemas, regular expressions, choices, grammars; structural_tags.py
lark.py             ... written as one grammar
reading/            what an answer consists of: reasoning, text, calls of tools
prompts.py          request -> token ids: texts, lists, chat templates
sampling.py         request -> SamplingParams: the checks that need the model, defaults, seeds
detokenizer.py      exact text, token by token
stops.py            stop strings, across token boundaries
logprobs.py         log probabilities in the shapes clients expect
vectors.py          embeddings as numbers: length 1, fewer dimensions, cosines
"""
