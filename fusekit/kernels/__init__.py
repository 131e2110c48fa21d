"""Device code in the CuTe DSL: main loops, schedulers, epilogues."""
