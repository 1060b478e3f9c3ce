"""An OpenAI-compatible server over `examples/llama` and `examples/minilm`, and a page that shows it at work.

What clients may ask: `serve.schema`, `serve.limits`. Texts: `serve.texts`, `serve.stops`, `serve.chat`; embeddings:
`serve.embeddings`. What is sent: `serve.answers`, `serve.errors`. What is watched: `serve.metrics`, `serve.live`.
All of it together: `serve.app`, over `serve.models`, in `serve.server`.
"""
