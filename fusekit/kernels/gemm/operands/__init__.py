"""The device halves of the operands, by the names of fusekit/plan/operands; what a driver calls stands in base.py."""
