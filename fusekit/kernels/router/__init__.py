"""The MoE router's kernels: a warp takes a token, its row of experts in registers; `select` finds the top K."""
