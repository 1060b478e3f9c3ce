"""MiniLM with ONNX Runtime (on the CPU, all cores), exported from PyTorch with the same weights.

The export happens in a process of its own, ``python onnx_minilm.py export MODEL FILE``, so that PyTorch is not in
the one that is timed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _protocol import Peer, Work, serve


def export(model: str, file: str) -> None:
    """Encoder, mean over the tokens and unit length as one graph; batch and length may vary."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    import torch
    from transformers import BertModel

    class Embed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertModel.from_pretrained(model, add_pooling_layer=False, attn_implementation="sdpa")

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask[:, :, None].to(hidden.dtype)
            mean = (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
            return torch.nn.functional.normalize(mean, dim=-1)

    # Two tensors: given the same one twice, the exporter takes one input for both.
    ids, mask = torch.ones((2, 16), dtype=torch.int64), torch.ones((2, 16), dtype=torch.int64)
    axes = {0: torch.export.Dim("batch", min=1, max=4096), 1: torch.export.Dim("length", min=2, max=512)}
    with torch.inference_mode():
        torch.onnx.export(
            Embed().eval(),
            (ids, mask),
            file,
            input_names=["ids", "mask"],
            output_names=["embeddings"],
            dynamic_shapes={"ids": axes, "mask": axes},
            dynamo=True,
        )


class Onnx(Peer):
    def setup(self, work: Work) -> dict[str, str]:
        import onnxruntime

        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder) / "minilm.onnx")
            subprocess.run([sys.executable, __file__, "export", work.model, file], check=True)
            self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        self.batches = [{"ids": ids.astype(np.int64), "mask": mask.astype(np.int64)} for ids, mask in work.batches]
        return {"onnxruntime": onnxruntime.__version__}

    def run(self, evaluations: int) -> tuple[int, Any]:
        passes = max(1, round(evaluations / len(self.batches)))
        found: list[Any] = []
        for _ in range(passes):
            found = [self.session.run(None, batch)[0] for batch in self.batches]
        return passes * len(self.batches), found


if __name__ == "__main__":
    if sys.argv[1:2] == ["export"]:
        export(*sys.argv[2:])
    else:
        serve(Onnx())
