"""A TransformerLens-style HookedModel of Gemma 4 12B "unified", bit-identical to transformers."""
