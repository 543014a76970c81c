"""Text to tokens and back.

tokenizer.py        the model's tokenizer and chat template
tokenizer_files.py  ... as the files of the model describe them; the only importer of transformers
chat_template.py    messages -> the text of a prompt
prompts.py          request -> token ids: texts, lists, chat templates
sampling.py         request -> SamplingParams: the checks that need the model, defaults, seeds
detokenizer.py      exact text, token by token
stops.py            stop strings, across token boundaries
logprobs.py         log probabilities in the shapes clients expect
"""
