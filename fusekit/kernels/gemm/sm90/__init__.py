"""Hopper. `forward`, `backward` and `wgrad` each put a kernel together from a plan and its operands' device halves."""
