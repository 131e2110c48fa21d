/* ---- SHA-256 (FIPS 180-4). */

enum { FK_DIGEST = 32 }; /* bytes */

static const uint32_t fk_sha256_start[8] = {0x6a09e667u, 0xbb67ae85u, 0x3c6ef372u, 0xa54ff53au,
                                            0x510e527fu, 0x9b05688cu, 0x1f83d9abu, 0x5be0cd19u};
static const uint32_t fk_sha256_rounds[64] = {
    0x428a2f98u, 0x71374491u, 0xb5c0fbcfu, 0xe9b5dba5u, 0x3956c25bu, 0x59f111f1u, 0x923f82a4u, 0xab1c5ed5u,
    0xd807aa98u, 0x12835b01u, 0x243185beu, 0x550c7dc3u, 0x72be5d74u, 0x80deb1feu, 0x9bdc06a7u, 0xc19bf174u,
    0xe49b69c1u, 0xefbe4786u, 0x0fc19dc6u, 0x240ca1ccu, 0x2de92c6fu, 0x4a7484aau, 0x5cb0a9dcu, 0x76f988dau,
    0x983e5152u, 0xa831c66du, 0xb00327c8u, 0xbf597fc7u, 0xc6e00bf3u, 0xd5a79147u, 0x06ca6351u, 0x14292967u,
    0x27b70a85u, 0x2e1b2138u, 0x4d2c6dfcu, 0x53380d13u, 0x650a7354u, 0x766a0abbu, 0x81c2c92eu, 0x92722c85u,
    0xa2bfe8a1u, 0xa81a664bu, 0xc24b8b70u, 0xc76c51a3u, 0xd192e819u, 0xd6990624u, 0xf40e3585u, 0x106aa070u,
    0x19a4c116u, 0x1e376c08u, 0x2748774cu, 0x34b0bcb5u, 0x391c0cb3u, 0x4ed8aa4au, 0x5b9cca4fu, 0x682e6ff3u,
    0x748f82eeu, 0x78a5636fu, 0x84c87814u, 0x8cc70208u, 0x90befffau, 0xa4506cebu, 0xbef9a3f7u, 0xc67178f2u};

static uint32_t fk_turned(uint32_t word, int bits) { return word >> bits | word << (32 - bits); }

static void fk_sha256_block(uint32_t state[8], const unsigned char *block) {
    uint32_t words[64], v[8], first, second;
    int index;
    for (index = 0; index < 16; ++index, block += 4)
        words[index] = (uint32_t)block[0] << 24 | (uint32_t)block[1] << 16 | (uint32_t)block[2] << 8 | block[3];
    for (; index < 64; ++index) {
        uint32_t a = words[index - 15], b = words[index - 2];
        words[index] = words[index - 16] + words[index - 7] + (fk_turned(a, 7) ^ fk_turned(a, 18) ^ a >> 3) +
                       (fk_turned(b, 17) ^ fk_turned(b, 19) ^ b >> 10);
    }
    memcpy(v, state, sizeof v);
    for (index = 0; index < 64; ++index) {
        first = v[7] + (fk_turned(v[4], 6) ^ fk_turned(v[4], 11) ^ fk_turned(v[4], 25)) +
                ((v[4] & v[5]) ^ (~v[4] & v[6])) + fk_sha256_rounds[index] + words[index];
        second = (fk_turned(v[0], 2) ^ fk_turned(v[0], 13) ^ fk_turned(v[0], 22)) +
                 ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += first;
        v[0] = first + second;
    }
    for (index = 0; index < 8; ++index) state[index] += v[index];
}

static void fk_sha256_of(const void *data, size_t size, unsigned char digest[FK_DIGEST]) {
    const unsigned char *bytes = (const unsigned char *)data;
    unsigned char last[128] = {0};
    uint32_t state[8];
    size_t rest = size % 64, end = rest < 56 ? 64 : 128;
    int index;
    memcpy(state, fk_sha256_start, sizeof state);
    for (; size >= 64; size -= 64, bytes += 64) fk_sha256_block(state, bytes);
    memcpy(last, bytes, rest);
    last[rest] = 0x80;
    size = (size_t)(bytes - (const unsigned char *)data) + rest;
    for (index = 0; index < 8; ++index) last[end - 1 - (size_t)index] = (unsigned char)((uint64_t)size * 8 >> 8 * index);
    fk_sha256_block(state, last);
    if (end == 128) fk_sha256_block(state, last + 64);
    for (index = 0; index < FK_DIGEST; ++index) digest[index] = (unsigned char)(state[index / 4] >> (24 - 8 * (index % 4)));
}
