"""What quantise makes of a block of numbers: the rules of scales, tiles, recipes.

a is the largest |v| of the block, NaN ignored. All arithmetic is float32. With `pow2` the scale is 2^e, e the least
integer in [-126, 126] with 448 2^e >= a; in bits, e = ((bits(a fl(1/448)) + 0x7fffff) >> 23) - 127. With `f32` it is
max(a, 1e-4) / 448. A code is v times the scale's reciprocal, rounded to nearest even; what is too large saturates. A
block of zeros with `pow2`, and one with an infinity, have scale 1.

MXFP8: blocks of 32, and as scale the byte e + 127, from 0 for zeros to 254 for an infinity. Byte (row i, block j) of
swizzled scales lies at ((i / 128) tiles + j / 4) 512 + (i % 32) 16 + (i / 32 % 4) 4 + j % 4, tiles = ceil(blocks / 4).
"""

BF16, WIDE = "bf16", "f32"
TYPES = (BF16, WIDE)  # of what is quantised; float32 is rounded to bf16 first
POW2, F32 = "pow2", "f32"
SCALES = (POW2, F32)
ROW, BLOCK = "fp8-row", "fp8-block"
MXFP8, AMAX = "mxfp8", "amax"
RECIPES = (ROW, BLOCK, MXFP8, AMAX)
PLAIN, SWIZZLED = "plain", "swizzled"
LAYOUTS = (PLAIN, SWIZZLED)  # of MXFP8's scales
ROWS, SQUARE = "1x128", "128x128"
BLOCKS = (ROWS, SQUARE)
LARGEST = 448.0  # e4m3
LEAST = 1e-4  # of a, for `f32`
MX_SIDE = 32  # numbers of one scale of MXFP8
MX_LARGEST = 254  # byte of a scale
ATOM = 512  # bytes of the scales of 128 x 128
# Of R, for the largest numbers after a rotation of 16 tokens.
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
SIDE = 128  # of a block, and of the tile that a thread block works on
WARPS = 8
MOST_TOPK = 16  # rows that a row becomes: their numbers lie in shared memory
