"""Frameworks, each imported by its own module alone and only when a program imports that module.

None is a dependency of fusekit, and none is needed to launch on its tensors: kernels take them by protocol. What is
here makes a kernel an operation of the framework's own compiler, and a layer a module with gradients.

============  ================================================================================
module        gives
============  ================================================================================
torch         `operator`: a custom operator with a fake, for torch.compile and torch.export;
              `MoE`: a layer as a module
transformers  `register`: an experts backend of Transformers 5
jax           calls inside jax.jit, through the XLA FFI: no copy, in the order of XLA's stream;
              layers with gradients
views         16-bit arrays of frameworks without bfloat16, seen as bf16 (any framework)
============  ================================================================================
"""
