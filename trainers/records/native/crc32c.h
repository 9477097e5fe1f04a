/* CRC-32C, by the CPU's instruction where it has one, else by tables; and TFRecord's masked form of it. */
#ifndef TRAINYARD_CRC32C_H
#define TRAINYARD_CRC32C_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

#include "bytes.h"

typedef struct {
    u32 table[8][256];
    i64 hardware; /* and not int, so that what follows a state in memory is aligned */
} crc_state;

static int crc_in_hardware(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("sse4.2") != 0;
#elif defined(__aarch64__) && defined(__linux__)
    return (getauxval(AT_HWCAP) & (1UL << 7)) != 0; /* HWCAP_CRC32 */
#else
    return 0;
#endif
}

static void crc_init(crc_state *s, int hardware) {
    s->hardware = hardware && crc_in_hardware();
    if (s->hardware) return;
    for (u32 i = 0; i < 256; i++) {
        u32 c = i;
        for (int k = 0; k < 8; k++) c = (c & 1) ? (c >> 1) ^ 0x82F63B78u : c >> 1;
        s->table[0][i] = c;
    }
    for (u32 i = 0; i < 256; i++)
        for (int k = 1; k < 8; k++)
            s->table[k][i] = (s->table[k - 1][i] >> 8) ^ s->table[0][s->table[k - 1][i] & 255];
}

/* Slicing by eight: M. Kounavis, F. Berry, A systematic approach to building high performance CRC, 2005. */
static u32 crc_table(const crc_state *s, u32 c, const u8 *p, u64 n) {
    for (; n >= 8; p += 8, n -= 8) {
        u64 w = load64(p) ^ c;
        c = s->table[7][w & 255] ^ s->table[6][(w >> 8) & 255] ^ s->table[5][(w >> 16) & 255] ^
            s->table[4][(w >> 24) & 255] ^ s->table[3][(w >> 32) & 255] ^ s->table[2][(w >> 40) & 255] ^
            s->table[1][(w >> 48) & 255] ^ s->table[0][w >> 56];
    }
    while (n--) c = (c >> 8) ^ s->table[0][(c ^ *p++) & 255];
    return c;
}

#if defined(__x86_64__)
#define HARDWARE __attribute__((target("sse4.2")))
#define STEP8(c, w) _mm_crc32_u64(c, w)
#define STEP1(c, b) _mm_crc32_u8((u32)(c), b)
#elif defined(__aarch64__) && defined(__linux__)
#define HARDWARE __attribute__((target("+crc")))
#define STEP8(c, w) __crc32cd((u32)(c), w)
#define STEP1(c, b) __crc32cb((u32)(c), b)
#endif

#if defined(HARDWARE)
HARDWARE static u32 crc_hard(u32 start, const u8 *p, u64 n) {
    u64 c = start;
    for (; n >= 8; p += 8, n -= 8) c = STEP8(c, load64(p));
    while (n--) c = STEP1(c, *p++);
    return (u32)c;
}

/* Four records side by side hide the three cycles that one step waits for the one before. */
HARDWARE static void crc_hard4(const u8 *const p[4], const u64 n[4], u32 out[4]) {
    u64 shortest = n[0];
    for (int i = 1; i < 4; i++)
        if (n[i] < shortest) shortest = n[i];
    shortest &= ~(u64)7;
    u64 a = 0xFFFFFFFFu, b = a, c = a, d = a;
    for (u64 i = 0; i < shortest; i += 8) {
        a = STEP8(a, load64(p[0] + i));
        b = STEP8(b, load64(p[1] + i));
        c = STEP8(c, load64(p[2] + i));
        d = STEP8(d, load64(p[3] + i));
    }
    out[0] = ~crc_hard((u32)a, p[0] + shortest, n[0] - shortest);
    out[1] = ~crc_hard((u32)b, p[1] + shortest, n[1] - shortest);
    out[2] = ~crc_hard((u32)c, p[2] + shortest, n[2] - shortest);
    out[3] = ~crc_hard((u32)d, p[3] + shortest, n[3] - shortest);
}
#endif

static u32 crc(const crc_state *s, const u8 *p, u64 n) {
#if defined(HARDWARE)
    if (s->hardware) return ~crc_hard(0xFFFFFFFFu, p, n);
#endif
    return ~crc_table(s, 0xFFFFFFFFu, p, n);
}

static inline void put_masked(u8 *to, u32 c) {
    c = ((c >> 15) | (c << 17)) + 0xA282EAD8u;
    memcpy(to, &c, 4);
}

#endif
