"""Rows between GPUs of one NVLink domain: dispatch of tokens to the ranks of their experts, and combine."""
