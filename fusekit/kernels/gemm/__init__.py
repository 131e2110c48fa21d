"""GEMMs: `sm90` has the main loop, scheduler and epilogue drivers, `operands` what each operand adds to them."""
