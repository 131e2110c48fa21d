"""The device halves of the operands, by the names of fusekit/plan/operands; what a driver calls is in base.py."""
