"""Launches looked at; benchmarks.md, beside this file, says how to use it.

===================  ================================================================================================
module               its job
===================  ================================================================================================
trial, router        one kernel on made-up tensors: is it right, how fast (`fusekit run`); trials opens either
compare              a launch's outputs against the reference
roofline             what a launch moves and computes, and what the device could do
timing, replay       device time by events, in interleaved rounds; as replays of a graph over rotating buffers
gemms, tokens        kernels beside what one would run otherwise (`fusekit bench`); shape: a model at any size
layer_trial, layers  a whole layer: is it right, how fast; beside the sum of its GEMMs. layer_tensors: made up
arrays               random tensors of any size, made on the device
torch_*              what PyTorch runs instead; imported only where it is asked for
host, margin,        what a launch costs the host; a GEMM beside communication; from process start to first result
startup              (`python -m`)
===================  ================================================================================================
"""
