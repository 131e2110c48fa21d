"""Device code of quantise: FP8 values and scales of a bf16 tensor."""
