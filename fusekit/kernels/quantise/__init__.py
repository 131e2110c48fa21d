"""Device code of quantise: codes and scales of a bf16 tensor."""
