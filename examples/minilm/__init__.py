"""all-MiniLM-L6-v2, a sentence encoder, in plain JAX: `minilm.model`; its tokenizer and some text: `minilm.text`."""
