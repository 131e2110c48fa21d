"""The MoE router's kernels: one warp a token, its row of experts in registers. See `select` for how the top K are found."""
