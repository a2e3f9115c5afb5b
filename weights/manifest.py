"""Writes `gemma-4-12B.tensors.json`: every tensor of the released 12B, from its architecture's numbers alone.

    python weights/manifest.py

Nothing is downloaded. A checkpoint can be held against it before it is loaded, and a test holds it against
the modules that transformers builds from the same numbers.
"""

import json
from pathlib import Path

from lens_gemma4 import HookedConfig
from lens_gemma4.loading import manifest

FILE = Path(__file__).parent / "gemma-4-12B.tensors.json"
CONFIG = {
    "model_type": "gemma4_unified",
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "text_config": {
        "vocab_size": 262_144,
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_hidden_layers": 48,  # five sliding, one full, eight times
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    },
    "vision_config": {
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "mm_embed_dim": 3840,
        "mm_posemb_size": 1120,
    },
    "audio_config": {"audio_embed_dim": 640},
}


def text() -> str:
    """The manifest as JSON, one tensor a line."""
    rows = [
        f"  {json.dumps(name)}: {json.dumps({'dtype': CONFIG['dtype'], 'shape': shape})}"
        for name, shape in manifest(HookedConfig.from_hf(CONFIG)).items()
    ]
    return "{\n" + ",\n".join(rows) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
