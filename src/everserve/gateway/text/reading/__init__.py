"""What an answer consists of: reasoning, text, and calls of tools, told apart while its text comes.

parts.py       Thought, Said, Called, Argued
scan.py        text in pieces -> a reader that is written as if it had all of it
format.py      what a format of calls is: how it is read, and its grammar
formats.py     all formats, by their names; which one a chat template writes
  hermes.py, llama.py, mistral.py, deepseek.py     JSON in marks
  pythonic.py  calls as in Python
  xml.py       a tag for each argument: GLM, MiniMax, Qwen3-Coder
  harmony.py   channels (gpt-oss): reasoning, text and calls in one
reasoning.py   marks around reasoning
answers.py     Reading: what is read in the answers of one request; AnswerReader: one answer

A reader's state is a function of the text so far. How the text is cut into pieces changes where deltas end, and nothing
else.
"""
