/* How many levels of levels.py are above this CPU: 0 if it has the best of its architecture.

   It is asked itself, and not /proc/cpuinfo, which may be absent and, under an emulator, another CPU's. Vector registers
   also need the kernel, which must save them when it switches threads: XCR0 says which of them it does save. */

#define EXPORT __attribute__((visibility("default")))

#if defined(__x86_64__)
#include <cpuid.h>
#include <stdbool.h>
#include <stdint.h>

#define SAVES_AVX 0x06u    /* XCR0: SSE, AVX */
#define SAVES_AVX512 0xe6u /* ... opmask, and both halves of ZMM */

/* cpuid.h of GCC and of Clang have these names. */
#define AVX2_IN_1C (bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C | bit_POPCNT)
#define AVX2_IN_7B (bit_AVX2 | bit_BMI | bit_BMI2)
#define AVX512_IN_7B (bit_AVX512F | bit_AVX512CD | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL)

static uint32_t saved_registers(void) {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static bool has_all(uint32_t word, uint32_t bits) { return (word & bits) == bits; }

EXPORT int es_cpu_level(void) {
    uint32_t a, b, c, d, b7, c7;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !has_all(c, AVX2_IN_1C)) return 2;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d) || !has_all(b7, AVX2_IN_7B)) return 2;
    uint32_t saved = saved_registers();
    if (!has_all(saved, SAVES_AVX)) return 2;
    return has_all(b7, AVX512_IN_7B) && has_all(saved, SAVES_AVX512) ? 0 : 1;
}
#else
EXPORT int es_cpu_level(void) { return 0; }
#endif
