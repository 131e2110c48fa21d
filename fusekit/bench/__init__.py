"""How fast a launch is: `timing` measures it, `roofline` says what the device could do."""
