"""Language models of the llama architecture, in plain JAX, read from GGUF files.

The container: `llama.gguf_file`; its weights: `llama.weights`; the model: `llama.model`; choosing tokens:
`llama.sampling`; the steps that a generator calls: `llama.steps`; text: `llama.tokenizer`.
"""
