"""MiniLM with sentence-transformers (PyTorch on the CPU, all cores), from the same files.

It is given the same tokens in the same batches, so that only the model is compared; `SentenceTransformer.encode`
would tokenize and batch by itself.
"""

from __future__ import annotations

import os
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}

import sentence_transformers
import torch
from _protocol import Peer, Work, serve


class Sentence(Peer):
    def setup(self, work: Work) -> dict[str, str]:
        self.model = sentence_transformers.SentenceTransformer(work.model, device="cpu").eval()
        self.batches = [
            {"input_ids": torch.from_numpy(ids).long(), "attention_mask": torch.from_numpy(mask).long()}
            for ids, mask in work.batches
        ]
        return {"sentence-transformers": sentence_transformers.__version__, "torch": torch.__version__}

    @torch.inference_mode()
    def run(self, evaluations: int) -> tuple[int, Any]:
        passes = max(1, round(evaluations / len(self.batches)))
        found: list[Any] = []
        for _ in range(passes):
            found = [self.model(dict(batch))["sentence_embedding"].numpy() for batch in self.batches]
        return passes * len(self.batches), found


if __name__ == "__main__":
    serve(Sentence())
