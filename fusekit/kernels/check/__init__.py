"""What a launch is given, looked at on the device."""
