"""Frameworks, each imported by its own module alone and only when a program imports that module.

None is a dependency of fusekit, and none is needed to launch on its tensors: kernels take them by protocol. What is
here makes a kernel an operation of the framework's own compiler, and a layer a module with gradients.
"""
