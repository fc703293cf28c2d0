// Rounds clients' numbers to 64-bit integers and adds them up, with the bits of the lines of
// sums.py that use torch. Compile without contraction of products and sums.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FAST __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FAST
#endif
#define INLINE __attribute__((always_inline)) inline

namespace {

constexpr int64_t BLOCK = 2048;  // numbers of a row at a time, so that their sums stay in the cache
constexpr double MAGIC = 6755399441055744.0;  // 1.5 * 2^52: MAGIC + v has round(v) in its low bits
constexpr uint64_t BITS = 0x4338000000000000;  // those of MAGIC
constexpr double HIGH = 4294967296.0;          // 2^32

INLINE uint64_t bits(double v) {
    uint64_t found;
    std::memcpy(&found, &v, sizeof found);
    return found;
}

// acc[i] += round(x[i] * c), ties to even, for products below 2^62. Rounds the upper and the lower
// half by themselves, each below 2^51: all steps but the last rounding are exact.
INLINE void add(uint64_t* __restrict acc, const float* __restrict x, double c, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        double v = x[i] * c, high = v * (1 / HIGH) + MAGIC, low = v - (high - MAGIC) * HIGH;
        acc[i] += ((bits(high) - BITS) << 32) + (bits(low + MAGIC) - BITS);
    }
}

// The bits of the largest |x|: their order is that of the numbers, with infinity and NaN last.
INLINE uint32_t largest(uint32_t most, const float* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        uint32_t one;
        std::memcpy(&one, x + i, sizeof one);
        one &= UINT32_MAX >> 1;
        most = one > most ? one : most;
    }
    return most;
}

}  // namespace

// acc [n] += the rows of x [m, n], row k times c[k] and rounded. Returns the largest |x|.
extern "C" FAST float add_rows(uint64_t* acc, const float* x, const double* c, int64_t m, int64_t n) {
    uint32_t most = 0;
    for (int64_t from = 0; from < n; from += BLOCK) {
        int64_t size = n - from < BLOCK ? n - from : BLOCK;
        for (int64_t k = 0; k < m; ++k) {
            most = largest(most, x + k * n + from, size);
            add(acc + from, x + k * n + from, c[k], size);
        }
    }
    float found;
    std::memcpy(&found, &most, sizeof found);
    return found;
}
