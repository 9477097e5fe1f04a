/* Numbers as they lie in memory, little-endian and at any place. */
#ifndef TRAINYARD_BYTES_H
#define TRAINYARD_BYTES_H

#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the encoder copies little-endian values as they lie in memory"
#endif

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

static inline u64 load64(const u8 *p) {
    u64 w;
    memcpy(&w, p, 8);
    return w;
}

static inline void store64(u8 *p, u64 w) { memcpy(p, &w, 8); }

#endif
