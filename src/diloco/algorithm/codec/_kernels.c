/* Block-wise codecs for tensors in host memory: once through the data, no temporaries.
 *
 * Bit for bit what int8.py and fp4.py do with torch operations: float32 arithmetic, no fused multiply-add (the build
 * passes -ffp-contract=off), no fast-math. The loops are plain C that compilers vectorise; where the platform can choose
 * at load time, the same loops are compiled again for AVX2.
 *
 * Payloads: the scales of all blocks, then the codes of all blocks. Pointers into payloads may be unaligned.
 */

#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Function multi-versioning needs ELF ifuncs, hence glibc. AVX-512 gained nothing over AVX2: memory is the limit. */
#if defined(__x86_64__) && defined(__GLIBC__) && (defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 6)
#define FOR_EACH_CPU __attribute__((target_clones("default", "avx2")))
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

#define KERNELS_VERSION 1 /* raised with every change of a signature or of a payload; native.py expects the same */

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

/* Begin to load the next block. Encoding reads a block twice; without this memory idles during the second reading, which
 * cost a quarter of the time. */
INLINE void prefetch(const float *values, int64_t start, int64_t count, int64_t block_size) {
#if defined(__GNUC__)
    int64_t stop = smaller(count, start + smaller(block_size, 4096));
    for (int64_t i = start; i < stop; i += 16) __builtin_prefetch(values + i);
#else
    (void)values, (void)start, (void)count, (void)block_size;
#endif
}

/* The bits of the largest magnitude: for finite floats they sort as the magnitudes do. */
INLINE uint32_t largest_magnitude(const float *RESTRICT values, int64_t count) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t magnitude = (int32_t)(bits_of(values[i]) & MAGNITUDE);
        largest = magnitude > largest ? magnitude : largest;
    }
    return (uint32_t)largest;
}


/* ---- int8: a float32 scale per block, a signed byte per value ---------------------------------------------------- */

#define INT8_MAX_SCALE 0x7bffffffu /* float32 max / 128: no byte times a scale overflows */
#define ROUND_TO_INTEGER 12582912.0f /* 1.5 * 2^23: adding it rounds to integer, half to even, into the low bits */

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

#define HALF_STEP 0x00400000u /* added before the shift: rounds to the nearest power of two (ties at 1.5 go up) */
#define LEAST_EXPONENT 7      /* code 1 is then the smallest normal float32: nothing decodes to a subnormal */
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

EXPORT int32_t diloco_kernels_version(void) { return KERNELS_VERSION; }

/* ctypes calls the functions above; an extension module must also be importable. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", "Kernels of the block-wise codecs, for ctypes.", 0,
                                    NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }
