"""Device code in the CuTe DSL: GEMMs, router, permutation, checks of arguments."""
