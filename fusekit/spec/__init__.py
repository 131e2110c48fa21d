"""Kernel specs: TOML to frozen values."""
