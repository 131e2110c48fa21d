"""Launches looked at: `trial` says whether a kernel is right, `timing` how fast, `roofline` what the device can do."""
