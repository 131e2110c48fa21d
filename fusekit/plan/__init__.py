"""What a kernel is, without the DSL: read by specs, by the compiler and by the device code alike."""
