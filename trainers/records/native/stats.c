/* How numbers are spread: sorted buckets and their counts, as trainers/records/sketch.py makes them with numpy.
 *
 * A number's key sorts as the number does: the bits of a float32, or of an int64 as float64, turned so. Keys are cut
 * by `shift` bits, counted where they lie close together and else sorted by radix; then as many more bits are dropped
 * as leave at most `most` different ones. sketch.py says why the result is the same in any cut and order.
 *
 * Nothing is allocated: the caller (native/numbers.py, which checks types and sizes) gives four arrays of n words of 8
 * bytes. There is no global state, so threads may count at once.
 */
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

enum { DIGIT = 11, SLOTS = 1 << DIGIT };

/* Must be the same as _FACTS in native/numbers.py. */
typedef struct {
    i64 shift;                   /* in: of the keys; out: with what was dropped */
    i64 n, zeros, nan, infinite; /* n counts the finite ones */
    i64 low, high;               /* of int64 */
    double low_float, high_float;
} facts;

static u64 key_of_float(u32 bits) { return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u); }

static u64 key_of_int(i64 number) {
    double value = (double)number;
    u64 bits;
    memcpy(&bits, &value, 8);
    return bits ^ (bits >> 63 ? UINT64_MAX : (u64)1 << 63);
}

static double float_of_key(u64 key) {
    u32 bits = (u32)key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu);
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* The n words sorted: in `words` or in `other`, whichever is returned. `differ`: bits in which words may differ. */
static u64 *sorted(u64 *words, u64 *other, i64 n, u64 differ) {
    for (int at = 0; at < 64 && differ >> at; at += DIGIT) {
        u32 starts[SLOTS] = {0};
        u32 sum = 0;
        for (i64 i = 0; i < n; i++) starts[words[i] >> at & (SLOTS - 1)]++;
        if (starts[words[0] >> at & (SLOTS - 1)] == (u64)n) continue; /* the same in all */
        for (int s = 0; s < SLOTS; s++) {
            u32 count = starts[s];
            starts[s] = sum;
            sum += count;
        }
        for (i64 i = 0; i < n; i++) other[starts[words[i] >> at & (SLOTS - 1)]++] = words[i];
        u64 *swap = words;
        words = other;
        other = swap;
    }
    return words;
}

/* Drop bits until at most `most` of n sorted, different keys are left; how many are. */
static i64 cut(u64 *keys, i64 *counts, i64 n, i64 most, i64 *shift) {
    i64 apart[65] = {0}; /* neighbours that fall together when that many bits are dropped, and not before */
    i64 left = n, out = 0;
    int drop = 0;
    if (n <= most) return n;
    for (i64 i = 1; i < n; i++) apart[64 - __builtin_clzll(keys[i] ^ keys[i - 1])]++;
    while (left > most) left -= apart[++drop];
    for (i64 i = 0; i < n; i++) {
        u64 key = drop < 64 ? keys[i] >> drop : 0;
        i64 count = counts[i];
        if (out && keys[out - 1] == key) {
            counts[out - 1] += count;
        } else {
            keys[out] = key;
            counts[out++] = count;
        }
    }
    *shift += drop;
    return out;
}

/* How many different ones there are of n words between low and high, less than 2n apart, each cut by `shift`; and, where
 * these are more than `most`, which and how often, in order. `slots` has room for 2n counts. */
static i64 tallied(const u64 *words, i64 n, int shift, u64 low, u64 high, i64 most, u32 *slots, u64 *keys, i64 *counts) {
    i64 out = 0;
    u64 base = low >> shift, span = (high >> shift) - base;
    memset(slots, 0, (span + 1) * sizeof *slots);
    for (i64 i = 0; i < n; i++) slots[(words[i] >> shift) - base]++;
    for (u64 s = 0; s <= span; s++) out += slots[s] != 0;
    if (out <= most) return out;
    out = 0;
    for (u64 s = 0; s <= span; s++)
        if (slots[s]) {
            keys[out] = base + s;
            counts[out++] = slots[s];
        }
    return out;
}

/* The different ones of n words, cut by *shift or, where that leaves more than `most`, by more; all words lie between low
 * and high. */
static i64 counted(u64 *words, u64 *other, i64 n, u64 low, u64 high, i64 most, i64 *shift, u64 *keys, i64 *counts) {
    int dense = (int)*shift;
    i64 out = 0;
    while ((high >> dense) - (low >> dense) >= 2 * (u64)n) dense++;
    if (dense == *shift) return tallied(words, n, dense, low, high, -1, (u32 *)other, keys, counts);
    /* Coarser than wanted, but if even that is too fine, no finer counts are needed. */
    out = tallied(words, n, dense, low, high, most, (u32 *)other, keys, counts);
    if (out > most) {
        *shift = dense;
        return out;
    }
    out = 0;
    if (*shift)
        for (i64 i = 0; i < n; i++) words[i] >>= *shift;
    const u64 *in = sorted(words, other, n, (low ^ high) >> *shift);
    for (i64 i = 0, first = 0; i < n; first = i) {
        while (i < n && in[i] == in[first]) i++;
        keys[out] = in[first];
        counts[out++] = i - first;
    }
    return out;
}

/* The buckets of n float32: how many there are. -0.0 is 0.0; NaN and infinities are told of and left out. */
EXPORT i64 ty_buckets_of_floats(const u32 *bits, i64 n, i64 most, facts *found, u64 *words, u64 *other, u64 *keys,
                                i64 *counts) {
    i64 zeros = 0, odd = 0;
    for (i64 i = 0; i < n; i++) {
        u32 size = bits[i] << 1;
        zeros += size == 0;
        odd += size >= 0xFF000000u;
        words[i] = key_of_float(size ? bits[i] : 0);
    }
    found->zeros = zeros;
    if (odd) {
        i64 out = 0;
        for (i64 i = 0; i < n; i++) {
            u32 size = bits[i] << 1;
            found->nan += size > 0xFF000000u;
            found->infinite += size == 0xFF000000u;
            if (size < 0xFF000000u) words[out++] = words[i];
        }
        n = out;
    }
    found->n = n;
    if (!n) return 0;
    u64 low = words[0], high = words[0];
    for (i64 i = 1; i < n; i++) {
        low = words[i] < low ? words[i] : low;
        high = words[i] > high ? words[i] : high;
    }
    found->low_float = float_of_key(low);
    found->high_float = float_of_key(high);
    i64 out = counted(words, other, n, low, high, most, &found->shift, keys, counts);
    return cut(keys, counts, out, most, &found->shift);
}

/* The same of n int64. */
EXPORT i64 ty_buckets_of_ints(const i64 *values, i64 n, i64 most, facts *found, u64 *words, u64 *other, u64 *keys,
                              i64 *counts) {
    i64 low = values[0], high = values[0], zeros = 0;
    for (i64 i = 0; i < n; i++) {
        low = values[i] < low ? values[i] : low;
        high = values[i] > high ? values[i] : high;
        zeros += values[i] == 0;
    }
    found->n = n;
    found->zeros = zeros;
    found->low = low;
    found->high = high;
    /* Counted as they are, so that only different numbers need keys. */
    for (i64 i = 0; i < n; i++) words[i] = (u64)values[i] - (u64)low;
    i64 out = 0, whole = 0, different = counted(words, other, n, 0, (u64)high - (u64)low, n, &whole, keys, counts);
    for (i64 i = 0; i < different; i++) {
        u64 key = key_of_int((i64)((u64)low + keys[i])) >> found->shift;
        i64 count = counts[i];
        if (out && keys[out - 1] == key) {
            counts[out - 1] += count;
        } else {
            keys[out] = key;
            counts[out++] = count;
        }
    }
    return cut(keys, counts, out, most, &found->shift);
}

/* Hashes below `limit` of n numbers, float32 of 4 bytes or int64 of 8, in their order: how many are in `out`. The hash
 * is the finaliser of MurmurHash3 (A. Appleby) without its last step. */
EXPORT i64 ty_hashes_below(const void *values, i64 n, int width, u64 limit, u64 *out) {
    i64 kept = 0;
    for (i64 i = 0; i < n; i++) {
        u64 key;
        if (width == 4) {
            u32 bits = ((const u32 *)values)[i];
            key = (u64)(i64)(int32_t)(bits << 1 ? bits : 0); /* -0.0 is 0.0 */
        } else {
            key = ((const u64 *)values)[i];
        }
        key = (key ^ key >> 33) * 0xFF51AFD7ED558CCDu;
        key = (key ^ key >> 33) * 0xC4CEB9FE1A85EC53u;
        out[kept] = key;
        kept += key <= limit;
    }
    return kept;
}
