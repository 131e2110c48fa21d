"""What quantise makes of a block of numbers: the rules of scales, tiles, recipes.

a is the largest |v| of the block, NaN ignored. All arithmetic is float32. With `pow2` the scale is 2^e, e the least
integer in [-126, 126] with 448 2^e >= a; in bits, e = ((bits(a fl(1/448)) + 0x7fffff) >> 23) - 127. With `f32` it is
max(a, 1e-4) / 448. A code is v times the scale's reciprocal, rounded to nearest even; what is too large saturates. A
block of zeros with `pow2`, and one with an infinity, have scale 1.
"""

POW2, F32 = "pow2", "f32"
SCALES = (POW2, F32)
ROW, BLOCK = "fp8-row", "fp8-block"
RECIPES = (ROW, BLOCK)
ROWS, SQUARE = "1x128", "128x128"
BLOCKS = (ROWS, SQUARE)
LARGEST = 448.0  # e4m3
LEAST = 1e-4  # of a, for `f32`
SIDE = 128  # of a block, and of the tile that a thread block works on
STRIP = 4  # tiles side by side that it takes one after the other
WARPS = 8
