"""From a spec to a cubin, its launch record and its proof; needs no GPU."""
