"""What a kernel is, without the DSL: read by specs, by the compiler and by the device code alike.

| module | its job |
|---|---|
| `operations` | the operations as rows of facts |
| `arch` | an architecture as a row of facts |
| `keys` | one key of a spec file |
| `shared` | a CTA's shared memory as a list of named regions |
| `gemm` | `GemmPlan`: stages, boxes, barriers, registers, memory and arguments of one GEMM kernel |
| `tiles` | which tiles fit an SM, and why others do not |
| `operands` | one file an operand: its key, rules, arguments, regions, scratch memory |
| `activations` | one file an activation: its value and its derivative |
"""
