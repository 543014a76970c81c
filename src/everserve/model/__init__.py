"""What is computed: architectures cut at the attention/expert seam.

config.py          ModelConfig: one Hugging Face config.json, checked
unbuilt.py         what other architectures need that is not built
fields.py          JSON fields, read with checks and clear errors
headers.py         what the safetensors files hold, from their headers alone
tied_head.py       whether a head that is tied to the embedding has weights of its own in the files
checkpoint.py      any slice of any tensor of the files, memory-mapped
fingerprint.py     telling a model's files from others under the same names
layout.py          which tensor of which architecture is which weight of ours
forms.py           how matrices of 8 and 4 bits lie in memory: from headers; quantised.py, quantised_files.py: them
weights.py         those tensors as a device wants them
rope.py            rotary tables, scaled as the config says; what a layer does with them
random_weights.py  random, untrained weights, for `--load-format dummy`
batch.py           StepBatch: the rows of one step and where their KV lives
attention_half.py  norms, attention, router, residual: of a stream's home
expert_half.py     a pure function of expert slots and rows: stateless
head_half.py       some heads of each layer, and their KV for all streams
decoder.py         embedding, layers, final norm, logits: the whole model around the seam
sampling.py        logits to tokens; randomness is a function of (seed, index)
penalties.py       presence, frequency and repetition penalties
ops.py             the arithmetic of one kind of device, as an interface (backends/)
choosing.py        the part of it that chooses tokens
bundled.py, demo/  the bundled model and where it is
"""
