/* Codecs and the digest for tensors in host memory, in one pass over the data and without temporaries.
 *
 * The results equal those of the torch operations in blockwise.py, topk2.py and digest.py bit for bit: float32 arithmetic,
 * no fused multiply-add (the build passes -ffp-contract=off), no fast-math. Compilers vectorise the loops, which are
 * plain C. If the platform can select a version at load time, the same loops are also compiled for AVX2.
 *
 * Payloads of block-wise codecs contain the scales of all blocks, then the codes of all blocks. Pointers into payloads
 * may be unaligned.
 */

#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Function multi-versioning needs ELF ifuncs, hence glibc. AVX-512 is no faster than AVX2: memory is the limit. */
#if defined(__x86_64__) && defined(__GLIBC__) && (defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 6)
#define FOR_EACH_CPU __attribute__((target_clones("default", "avx2")))
#define FOUR_PRODUCTS
#include <immintrin.h>
#else
#define FOR_EACH_CPU
#endif

#if defined(_MSC_VER)
#define INLINE static __forceinline
#define RESTRICT __restrict
#else
#define INLINE static inline __attribute__((always_inline))
#define RESTRICT restrict
#endif

#define KERNELS_VERSION 3 /* increase with every change of a signature or a payload; native.py checks it */

#define MAGNITUDE 0x7fffffffu
#define SMALLEST_NORMAL 0x00800000u

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Prefetch the next block. Encoding reads a block twice; without prefetching, memory is idle during the second pass,
 * which cost a quarter of the time. */
INLINE void prefetch(const float *values, int64_t start, int64_t count, int64_t block_size) {
#if defined(__GNUC__)
    int64_t stop = smaller(count, start + smaller(block_size, 4096));
    for (int64_t i = start; i < stop; i += 16) __builtin_prefetch(values + i);
#else
    (void)values, (void)start, (void)count, (void)block_size;
#endif
}

/* Return the bits of the largest magnitude; the bits of finite magnitudes have the same order as their values. */
INLINE uint32_t largest_magnitude(const float *RESTRICT values, int64_t count) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t magnitude = (int32_t)(bits_of(values[i]) & MAGNITUDE);
        largest = magnitude > largest ? magnitude : largest;
    }
    return (uint32_t)largest;
}


/* ``largest`` is NaN if any value is: its bits are above those of infinity. */
EXPORT FOR_EACH_CPU void diloco_float32_largest(const float *values, int64_t count, float *largest) {
    uint32_t most = 0;
    for (int64_t start = 0; start < count; start += 4096) {
        uint32_t here = largest_magnitude(values + start, smaller(4096, count - start));
        prefetch(values, start + 4096, count, 4096);
        most = here > most ? here : most;
    }
    *largest = float_of(most);
}

EXPORT FOR_EACH_CPU void diloco_float32_accumulate(const uint8_t *payload, int64_t count, float weight, float *out) {
    for (int64_t i = 0; i < count; i++) {
        float value;
        memcpy(&value, payload + 4 * i, sizeof value);
        out[i] += weight * value;
    }
}

/* ---- int8: a float32 scale per block, a signed byte per value ---------------------------------------------------- */

#define INT8_MAX_SCALE 0x7bffffffu /* float32 max / 128: the product of any byte and a scale is finite */
#define ROUND_TO_INTEGER 12582912.0f /* 1.5 * 2^23: adding it rounds to integer, half to even, in the low bits */

INLINE void int8_encode_block(const float *RESTRICT values, int64_t count, uint8_t *RESTRICT scale_at,
                              uint8_t *RESTRICT codes) {
    float largest = float_of(largest_magnitude(values, count));
    float scale = largest / 127.0f;
    if (scale > float_of(INT8_MAX_SCALE)) scale = float_of(INT8_MAX_SCALE);
    if (scale < float_of(SMALLEST_NORMAL)) {
        memset(scale_at, 0, sizeof scale);
        memset(codes, 0, (size_t)count);
        return;
    }
    memcpy(scale_at, &scale, sizeof scale);
    float inverse = 127.0f / largest;
    for (int64_t i = 0; i < count; i++) {
        float scaled = values[i] * inverse;
        codes[i] = (uint8_t)bits_of(scaled + ROUND_TO_INTEGER);
    }
}

EXPORT FOR_EACH_CPU void diloco_int8_encode(const float *values, int64_t count, int64_t block_size, uint8_t *scales,
                                            uint8_t *codes) {
    for (int64_t start = 0; start < count; start += block_size, scales += 4) {
        prefetch(values, start + block_size, count, block_size);
        int8_encode_block(values + start, smaller(block_size, count - start), scales, codes + start);
    }
}

EXPORT FOR_EACH_CPU void diloco_int8_decode(const uint8_t *scales, const uint8_t *codes, int64_t count,
                                            int64_t block_size, float *out) {
    for (int64_t start = 0; start < count; start += block_size, scales += 4) {
        const int8_t *RESTRICT block = (const int8_t *)codes + start;
        float *RESTRICT to = out + start;
        int64_t length = smaller(block_size, count - start);
        float scale;
        memcpy(&scale, scales, sizeof scale);
        for (int64_t i = 0; i < length; i++) to[i] = (float)block[i] * scale;
    }
}

EXPORT FOR_EACH_CPU void diloco_int8_accumulate(const uint8_t *scales, const uint8_t *codes, int64_t count,
                                                int64_t block_size, float weight, float *out) {
    for (int64_t start = 0; start < count; start += block_size, scales += 4) {
        const int8_t *RESTRICT block = (const int8_t *)codes + start;
        float *RESTRICT to = out + start;
        int64_t length = smaller(block_size, count - start);
        float scale;
        memcpy(&scale, scales, sizeof scale);
        for (int64_t i = 0; i < length; i++) to[i] += weight * ((float)block[i] * scale);
    }
}

/* ---- fp4: a biased exponent per block, sign and three exponent bits per value -------------------------------------
 * Byte j of a block of n values holds value j (low half) and value j + ceil(n / 2) (high half): no interleaving. */

#define HALF_STEP 0x00400000u /* added before the shift, rounds to the nearest power of two (ties at 1.5 round up) */
#define LEAST_EXPONENT 7      /* makes code 1 the smallest normal float32: no value decodes to a subnormal */
#define GREATEST_EXPONENT 254

INLINE int32_t rounded_exponent(uint32_t bits) { return (int32_t)(((bits & MAGNITUDE) + HALF_STEP) >> 23); }

INLINE int32_t fp4_code(uint32_t bits, int32_t offset) {
    int32_t code = rounded_exponent(bits) + offset;
    code = code < 0 ? 0 : code;
    code = code > 7 ? 7 : code;
    return code | (int32_t)((bits >> 28) & 8);
}

INLINE float fp4_value(uint32_t code, int32_t offset) {
    uint32_t exponent = code & 7;
    uint32_t magnitude = exponent ? (exponent + (uint32_t)offset) << 23 : 0;
    return float_of(magnitude | (code & 8) << 28);
}

EXPORT FOR_EACH_CPU void diloco_fp4_encode(const float *values, int64_t count, int64_t block_size, uint8_t *exponents,
                                           uint8_t *codes) {
    for (int64_t start = 0; start < count; start += block_size, codes += block_size / 2) {
        int64_t length = smaller(block_size, count - start), pairs = length / 2, half = (length + 1) / 2;
        const float *RESTRICT low = values + start, *RESTRICT high = low + half;
        uint8_t *RESTRICT to = codes;
        prefetch(values, start + block_size, count, block_size);
        int32_t exponent = rounded_exponent(largest_magnitude(low, length));
        exponent = exponent < LEAST_EXPONENT ? LEAST_EXPONENT : exponent;
        exponent = exponent > GREATEST_EXPONENT ? GREATEST_EXPONENT : exponent;
        *exponents++ = (uint8_t)exponent;
        int32_t offset = 7 - exponent;
        for (int64_t i = 0; i < pairs; i++)
            to[i] = (uint8_t)(fp4_code(bits_of(low[i]), offset) | fp4_code(bits_of(high[i]), offset) << 4);
        if (half > pairs) to[pairs] = (uint8_t)fp4_code(bits_of(low[pairs]), offset);
    }
}

EXPORT FOR_EACH_CPU void diloco_fp4_decode(const uint8_t *exponents, const uint8_t *codes, int64_t count,
                                           int64_t block_size, float *out) {
    for (int64_t start = 0; start < count; start += block_size, codes += block_size / 2) {
        int64_t length = smaller(block_size, count - start), pairs = length / 2, half = (length + 1) / 2;
        float *RESTRICT low = out + start, *RESTRICT high = low + half;
        const uint8_t *RESTRICT from = codes;
        int32_t offset = *exponents++ - 7;
        for (int64_t i = 0; i < pairs; i++) low[i] = fp4_value(from[i], offset);
        for (int64_t i = 0; i < pairs; i++) high[i] = fp4_value(from[i] >> 4, offset);
        if (half > pairs) low[pairs] = fp4_value(from[pairs], offset);
    }
}

EXPORT FOR_EACH_CPU void diloco_fp4_accumulate(const uint8_t *exponents, const uint8_t *codes, int64_t count,
                                               int64_t block_size, float weight, float *out) {
    for (int64_t start = 0; start < count; start += block_size, codes += block_size / 2) {
        int64_t length = smaller(block_size, count - start), pairs = length / 2, half = (length + 1) / 2;
        float *RESTRICT low = out + start, *RESTRICT high = low + half;
        const uint8_t *RESTRICT from = codes;
        int32_t offset = *exponents++ - 7;
        for (int64_t i = 0; i < pairs; i++) low[i] += weight * fp4_value(from[i], offset);
        for (int64_t i = 0; i < pairs; i++) high[i] += weight * fp4_value(from[i] >> 4, offset);
        if (half > pairs) low[pairs] += weight * fp4_value(from[pairs], offset);
    }
}

#define LEVELS 1048576.0f /* magnitudes become integers up to this, whose sums do not depend on their order */
#define LEAST_MAXIMUM 0x0d800000u /* 2^-100; below it LEVELS / maximum would come close to overflow */
#define LARGEST_BFLOAT16 0x7f7f0000u

INLINE uint16_t bfloat16_of(float value) {
    uint32_t bits = bits_of(value);
    if (bits > LARGEST_BFLOAT16) bits = LARGEST_BFLOAT16;
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

/* ---- sign: a bfloat16 scale per block, the mean magnitude, and a bit per value --------------------------------------
 * Bit i of byte j of a block of n values is the sign of value j + i * ceil(n / 8). */

INLINE void sign_encode_block(const float *RESTRICT values, int64_t count, uint8_t *scale_at, uint8_t *RESTRICT codes) {
    uint32_t most = largest_magnitude(values, count);
    float largest = float_of(most), inverse = most < LEAST_MAXIMUM ? 0.0f : LEVELS / largest;
    int64_t sum = 0, strip = (count + 7) / 8;
    for (int64_t i = 0; i < count; i++) sum += (int32_t)(float_of(bits_of(values[i]) & MAGNITUDE) * inverse);
    uint16_t scale = bfloat16_of((float)sum / (float)count * (largest / LEVELS));
    memcpy(scale_at, &scale, sizeof scale);
    memset(codes, 0, (size_t)strip);
    for (int64_t bit = 0; bit < 8; bit++, values += strip, count -= strip)
        for (int64_t j = 0; j < smaller(strip, count); j++) codes[j] |= (uint8_t)(bits_of(values[j]) >> 31 << bit);
}

INLINE float sign_value(const uint8_t *scale_at, uint32_t sign) {
    uint16_t scale;
    memcpy(&scale, scale_at, sizeof scale);
    return float_of((uint32_t)scale << 16 | sign << 31);
}

EXPORT FOR_EACH_CPU void diloco_sign_encode(const float *values, int64_t count, int64_t block_size, uint8_t *scales,
                                            uint8_t *codes) {
    for (int64_t start = 0; start < count; start += block_size, scales += 2, codes += block_size / 8) {
        prefetch(values, start + block_size, count, block_size);
        sign_encode_block(values + start, smaller(block_size, count - start), scales, codes);
    }
}

EXPORT FOR_EACH_CPU void diloco_sign_decode(const uint8_t *scales, const uint8_t *codes, int64_t count,
                                            int64_t block_size, float *out) {
    for (int64_t start = 0; start < count; start += block_size, scales += 2, codes += block_size / 8) {
        float *RESTRICT to = out + start;
        int64_t left = smaller(block_size, count - start), strip = (left + 7) / 8;
        for (uint32_t bit = 0; bit < 8; bit++, to += strip, left -= strip)
            for (int64_t j = 0; j < smaller(strip, left); j++) to[j] = sign_value(scales, codes[j] >> bit & 1);
    }
}

EXPORT FOR_EACH_CPU void diloco_sign_accumulate(const uint8_t *scales, const uint8_t *codes, int64_t count,
                                                int64_t block_size, float weight, float *out) {
    for (int64_t start = 0; start < count; start += block_size, scales += 2, codes += block_size / 8) {
        float *RESTRICT to = out + start;
        int64_t left = smaller(block_size, count - start), strip = (left + 7) / 8;
        for (uint32_t bit = 0; bit < 8; bit++, to += strip, left -= strip)
            for (int64_t j = 0; j < smaller(strip, left); j++) to[j] += weight * sign_value(scales, codes[j] >> bit & 1);
    }
}

/* ---- topk2: of each tile of 4096 values the 64 largest: two bfloat16 levels, 12-bit positions, 2-bit codes --------- */

#define TILE 4096
#define SPREAD 64
#define GROUPS 256 /* the number of groups of a tile; at most a quarter of them contain kept values */

/* Move the ``kept`` largest keys to the front. */
INLINE void select_largest(uint64_t *keys, int64_t count, int64_t kept) {
    int64_t left = 0, right = count - 1;
    while (left < right) {
        uint64_t pivot = keys[left + (right - left) / 2];
        int64_t i = left, j = right;
        while (i <= j) {
            while (keys[i] > pivot) i++;
            while (keys[j] < pivot) j--;
            if (i <= j) {
                uint64_t key = keys[i];
                keys[i++] = keys[j];
                keys[j--] = key;
            }
        }
        if (kept - 1 <= j) right = j;
        else if (kept - 1 >= i) left = i;
        else return;
    }
}

INLINE uint64_t key_of(const float *values, int64_t at) {
    return (uint64_t)(bits_of(values[at]) & MAGNITUDE) << 12 | (uint64_t)(TILE - 1 - at);
}

/* Mark the largest magnitudes of a tile; of equal ones the first is marked. */
INLINE void mark_kept(const float *RESTRICT values, int64_t count, int64_t kept, uint64_t *RESTRICT marks) {
    int32_t largest[GROUPS];
    uint64_t keys[TILE];
    int64_t groups = smaller(GROUPS, count), candidates = 0;
    for (int64_t i = 0; i < groups; i++) largest[i] = (int32_t)(bits_of(values[i]) & MAGNITUDE);
    for (int64_t start = GROUPS; start < count; start += GROUPS) {
        int64_t here = smaller(GROUPS, count - start);
        for (int64_t i = 0; i < here; i++) {
            int32_t magnitude = (int32_t)(bits_of(values[start + i]) & MAGNITUDE);
            largest[i] = magnitude > largest[i] ? magnitude : largest[i];
        }
    }
    /* ``least`` is the kept-th largest maximum of a group: no smaller value can be kept */
    for (int64_t i = 0; i < groups; i++) keys[i] = (uint64_t)largest[i];
    select_largest(keys, groups, kept);
    uint64_t least = keys[0];
    for (int64_t i = 1; i < kept; i++) least = keys[i] < least ? keys[i] : least;
    for (int64_t i = 0; i < groups; i++) {
        if ((uint64_t)largest[i] < least) continue;
        for (int64_t at = i; at < count; at += GROUPS) {
            keys[candidates] = key_of(values, at);
            candidates += keys[candidates] >> 12 >= least;
        }
    }
    select_largest(keys, candidates, kept);
    for (int64_t i = 0; i < kept; i++) {
        uint64_t at = TILE - 1 - (keys[i] & (TILE - 1));
        marks[at >> 6] |= (uint64_t)1 << (at & 63);
    }
}

INLINE uint8_t *topk2_encode_tile(const float *RESTRICT values, int64_t count, uint8_t *RESTRICT to) {
    int64_t kept = (count + SPREAD - 1) / SPREAD, position_bytes = (12 * kept + 7) / 8, code_bytes = (2 * kept + 7) / 8;
    uint64_t marks[TILE / 64] = {0};
    int32_t positions[TILE / SPREAD], sizes[TILE / SPREAD];
    uint32_t most = 0;
    mark_kept(values, count, kept, marks);
    int64_t found = 0;
    for (int64_t word = 0; word < TILE / 64; word++)
        for (uint64_t left = marks[word]; left; left &= left - 1) {
            int32_t bit = 0;
#if defined(__GNUC__)
            bit = __builtin_ctzll(left);
#else
            while (!(left >> bit & 1)) bit++;
#endif
            positions[found++] = (int32_t)(64 * word) + bit;
        }
    for (int64_t i = 0; i < kept; i++) {
        uint32_t bits = bits_of(values[positions[i]]) & MAGNITUDE;
        most = bits > most ? bits : most;
    }
    float largest = float_of(most), inverse = most < LEAST_MAXIMUM ? 0.0f : LEVELS / largest;
    int64_t sum = 0, high_sum = 0, high_count = 0;
    for (int64_t i = 0; i < kept; i++) {
        sizes[i] = (int32_t)(float_of(bits_of(values[positions[i]]) & MAGNITUDE) * inverse);
        sum += sizes[i];
    }
    memset(to + 4, 0, (size_t)(position_bytes + code_bytes));
    uint8_t *packed = to + 4, *codes = packed + position_bytes;
    for (int64_t i = 0; i < kept; i++) {
        int64_t is_high = sizes[i] * kept > sum;
        high_sum += is_high ? sizes[i] : 0;
        high_count += is_high;
        uint32_t code = (uint32_t)is_high | (uint32_t)(values[positions[i]] < 0.0f) << 1;
        codes[i >> 2] |= (uint8_t)(code << (2 * (i & 3)));
        int64_t bit = 12 * i;
        uint32_t shifted = (uint32_t)positions[i] << (bit & 7);
        packed[bit >> 3] |= (uint8_t)shifted;
        packed[(bit >> 3) + 1] |= (uint8_t)(shifted >> 8);
    }
    float unit = largest / LEVELS;
    float low = (float)(sum - high_sum) / (float)(kept - high_count) * unit;
    float high = high_count ? (float)high_sum / (float)high_count * unit : 0.0f;
    if (high < low) high = low;
    uint16_t levels[2] = {bfloat16_of(low), bfloat16_of(high)};
    memcpy(to, levels, sizeof levels);
    return codes + code_bytes;
}

EXPORT FOR_EACH_CPU void diloco_topk2_encode(const float *values, int64_t count, uint8_t *records) {
    for (int64_t start = 0; start < count; start += TILE) {
        prefetch(values, start + TILE, count, TILE);
        records = topk2_encode_tile(values + start, smaller(TILE, count - start), records);
    }
}

EXPORT void diloco_topk2_accumulate(const uint8_t *records, int64_t count, float weight, float *out) {
    for (int64_t start = 0; start < count; start += TILE) {
        int64_t length = smaller(TILE, count - start), kept = (length + SPREAD - 1) / SPREAD;
        const uint8_t *packed = records + 4, *codes = packed + (12 * kept + 7) / 8;
        uint16_t levels[2];
        memcpy(levels, records, sizeof levels);
        float values[4];
        for (uint32_t code = 0; code < 4; code++) {
            float value = float_of((uint32_t)levels[code & 1] << 16);
            values[code] = weight * (code & 2 ? -value : value);
        }
        for (int64_t i = 0; i < kept; i++) {
            int64_t bit = 12 * i;
            uint32_t pair = (uint32_t)packed[bit >> 3] | (uint32_t)packed[(bit >> 3) + 1] << 8;
            int64_t at = pair >> (bit & 7) & (TILE - 1);
            if (at < length) out[start + at] += values[codes[i >> 2] >> (2 * (i & 3)) & 3];
        }
        records = codes + (2 * kept + 7) / 8;
    }
}

/* ---- digest: of each block of 32-bit lanes the sums of their products with two keys of their place, modulo 2^64 ------ */

#define AHEAD 2048 /* bytes; without prefetching, memory is idle while the sums of a block are written */

INLINE void add_products(const uint8_t *lanes, int64_t count, const int32_t *keys, const int32_t *others,
                         uint64_t *RESTRICT sums) {
    for (int64_t i = 0; i < count; i++) {
        int32_t lane;
        memcpy(&lane, lanes + 4 * i, sizeof lane);
        sums[0] += (uint64_t)((int64_t)keys[i] * lane);
        sums[1] += (uint64_t)((int64_t)others[i] * lane);
    }
}

#if defined(FOUR_PRODUCTS)
/* Compilers shuffle the lanes to widen them, which takes twice as long as the multiplications. */
__attribute__((target("avx2"))) static void four_products(const uint8_t *lanes, int64_t count, const int32_t *keys,
                                                          const int32_t *others, uint64_t *RESTRICT sums) {
    __m256i even[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()}, odd[2] = {even[0], even[0]};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        _mm_prefetch((const char *)lanes + 4 * i + AHEAD, _MM_HINT_T0);
        for (int64_t at = i; at < i + 16; at += 8) {
            __m256i low = _mm256_loadu_si256((const __m256i *)(lanes + 4 * at)), high = _mm256_srli_epi64(low, 32);
            for (int32_t which = 0; which < 2; which++) {
                __m256i key = _mm256_loadu_si256((const __m256i *)((which ? others : keys) + at));
                even[which] = _mm256_add_epi64(even[which], _mm256_mul_epi32(low, key));
                odd[which] = _mm256_add_epi64(odd[which], _mm256_mul_epi32(high, _mm256_srli_epi64(key, 32)));
            }
        }
    }
    for (int32_t which = 0; which < 2; which++) {
        uint64_t parts[4];
        _mm256_storeu_si256((__m256i *)parts, _mm256_add_epi64(even[which], odd[which]));
        sums[which] += parts[0] + parts[1] + parts[2] + parts[3];
    }
    add_products(lanes + 4 * i, count - i, keys + i, others + i, sums);
}
#endif

/* ``keys`` are those of all places in a block, then the second ones; ``sums`` two of each block. */
EXPORT void diloco_digest_sums(const uint8_t *lanes, int64_t count, const int32_t *keys, int64_t block_size,
                               uint64_t *sums) {
    void (*add)(const uint8_t *, int64_t, const int32_t *, const int32_t *, uint64_t *) = add_products;
#if defined(FOUR_PRODUCTS)
    if (__builtin_cpu_supports("avx2")) add = four_products;
#endif
    for (int64_t start = 0; start < count; start += block_size, sums += 2) {
        sums[0] = sums[1] = 0;
        add(lanes + 4 * start, smaller(block_size, count - start), keys, keys + block_size, sums);
    }
}

EXPORT int32_t diloco_kernels_version(void) { return KERNELS_VERSION; }

/* ctypes calls the functions above; an extension module must also be importable. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", "Kernels of the block-wise codecs, for ctypes.", 0,
                                    NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }
