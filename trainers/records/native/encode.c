/* Arrow columns in, framed TFRecords of tf.train.Example out: the same bytes as trainers/records/encode.py.
 *
 * One call encodes one record batch. The caller (native/__init__.py) fills an array of `column`, sorted by key,
 * with pointers into Arrow's buffers that already count from the batch's first row, and gives an output buffer
 * of at least ty_bound() bytes. Nothing is read or written outside of these: lengths come with every pointer,
 * every offset that is read from a buffer is checked before it is used, and room is checked before a row and
 * before each value whose length is not known beforehand. Nothing is allocated but one small program; there is
 * no global state, so threads may encode at once.
 *
 * Wire format: https://protobuf.dev/programming-guides/encoding/ and TensorFlow's record_writer.h:
 *   record  = length u64, masked CRC-32C of the length u32, Example, masked CRC-32C of the Example u32
 *   Example = 0A len { 0A len { 0A len key, 12 len { tag len list } } ... }     tag: 0A bytes, 12 float, 1A int64
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the encoder copies little-endian values as they lie in memory"
#endif
#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#ifndef TY_SOURCE
#define TY_SOURCE "unknown"
#endif

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

enum { FLOAT = 0, INT64 = 1, BYTES = 2 };
enum { NO_ROOM = -1, BAD_OFFSETS = -2, NO_MEMORY = -3, BAD_COLUMN = -4 };

/* Must be the same as _Column in native/__init__.py. */
typedef struct {
    i64 value;               /* FLOAT, INT64 or BYTES */
    const u8 *data;          /* the values: 4 or 8 bytes each, or the bytes that `offsets` cut */
    i64 data_size;           /* bytes at `data` */
    const u8 *offsets;       /* BYTES: where each value starts, and the end of the last; or null */
    i64 offset_width;        /* 4 or 8; 0: every value has `size` bytes */
    i64 size;
    i64 items;               /* values at hand: as many as rows, or those of all lists */
    i64 is_list;
    const u8 *list_offsets;  /* lists: the first item of each, and the end of the last; or null */
    i64 list_width;          /* 4 or 8; 0: every list has `list_size` items */
    i64 list_size;
    const u8 *valid;         /* a bit a row, or null where all rows have a value */
    i64 valid_at;            /* the bit of row 0 */
    const u8 *key;
    i64 key_size;
} column;

/* ---- CRC-32C ------------------------------------------------------------------------------------------- */

typedef struct {
    u32 table[8][256];
    int hardware;
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

static inline u64 load64(const u8 *p) {
    u64 w;
    memcpy(&w, p, 8);
    return w;
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

/* ---- Varints and headers ------------------------------------------------------------------------------- */

static inline i64 varint_size(u64 x) { return (70 - __builtin_clzll(x | 1)) / 7; }

static inline u8 *put_varint(u8 *p, u64 x) {
    while (x >= 128) {
        *p++ = (u8)(x | 128);
        x >>= 7;
    }
    *p++ = (u8)x;
    return p;
}

static const u8 LIST_TAG[3] = {0x12, 0x1A, 0x0A};

/* What stands before `inner` bytes of list message, of which `payload` are behind the list's own head. */
static u8 *put_header(u8 *p, const column *c, u64 payload, int with_head) {
    u64 list = with_head ? payload + 1 + (u64)varint_size(payload) : payload;
    u64 feature = 1 + (u64)varint_size(list) + list;
    u64 key = 1 + (u64)varint_size((u64)c->key_size) + (u64)c->key_size;
    u64 entry = key + 1 + (u64)varint_size(feature) + feature;
    *p++ = 0x0A;
    p = put_varint(p, entry);
    *p++ = 0x0A;
    p = put_varint(p, (u64)c->key_size);
    memcpy(p, c->key, (size_t)c->key_size);
    p += c->key_size;
    *p++ = 0x12;
    p = put_varint(p, feature);
    *p++ = LIST_TAG[c->value];
    p = put_varint(p, list);
    if (with_head) {
        *p++ = 0x0A;
        p = put_varint(p, payload);
    }
    return p;
}

/* Bytes that a header takes at most: five tags and lengths below 2**35, and the key. */
static inline i64 header_most(const column *c) { return c->key_size + 5 * 6; }

/* A short value's: all lengths stay below 128, which `is_short` promises. */
static inline int is_short(const column *c) { return c->key_size <= 96; }

/* ---- Values of columns --------------------------------------------------------------------------------- */

static inline int is_valid(const column *c, i64 row) {
    if (!c->valid) return 1;
    u64 bit = (u64)(c->valid_at + row);
    return (c->valid[bit >> 3] >> (bit & 7)) & 1;
}

static inline i64 offset_at(const u8 *offsets, i64 width, i64 i) {
    if (width == 4) {
        int32_t v;
        memcpy(&v, offsets + 4 * i, 4);
        return v;
    }
    i64 v;
    memcpy(&v, offsets + 8 * i, 8);
    return v;
}

/* The bytes of item i; 0 when the offsets are not in order or lead out of the data. */
static inline int bytes_at(const column *c, i64 i, const u8 **from, i64 *size) {
    if (!c->offset_width) {
        *from = c->data + i * c->size;
        *size = c->size;
        return 1;
    }
    i64 a = offset_at(c->offsets, c->offset_width, i), b = offset_at(c->offsets, c->offset_width, i + 1);
    if (a < 0 || b < a || b > c->data_size) return 0;
    *from = c->data + a;
    *size = b - a;
    return 1;
}

static inline int list_at(const column *c, i64 row, i64 *first, i64 *end) {
    if (!c->list_width) {
        *first = row * c->list_size;
        *end = *first + c->list_size;
    } else {
        *first = offset_at(c->list_offsets, c->list_width, row);
        *end = offset_at(c->list_offsets, c->list_width, row + 1);
    }
    return *first >= 0 && *end >= *first && *end <= c->items;
}

/* Whether what a column says of itself fits together for so many rows. */
static int is_sound(const column *c, i64 rows) {
    const i64 most = (i64)1 << 34;
    if (c->value < FLOAT || c->value > BYTES || c->key_size < 0 || c->key_size > (1 << 24)) return 0;
    if (c->data_size < 0 || c->data_size > most || c->items < 0 || c->items > most) return 0;
    if (c->value == FLOAT && c->data_size / 4 < c->items) return 0;
    if (c->value == INT64 && c->data_size / 8 < c->items) return 0;
    if (c->value == BYTES) {
        if (c->offset_width != 0 && c->offset_width != 4 && c->offset_width != 8) return 0;
        if (!c->offset_width && (c->size < 0 || c->size > most)) return 0;
        if (!c->offset_width && c->size && c->data_size / c->size < c->items) return 0;
        if (c->offset_width && !c->offsets && c->items) return 0;
    }
    if (!c->is_list) return c->items == rows;
    if (c->list_width != 0 && c->list_width != 4 && c->list_width != 8) return 0;
    if (c->list_width) return c->list_offsets != NULL || !rows;
    return c->list_size >= 0 && (!c->list_size || c->items / c->list_size >= rows);
}

/* ---- The program: what is done for each row, made once a batch ------------------------------------------- */

enum { STEP_FIXED, STEP_INT, STEP_BYTES, STEP_FLOATS, STEP_INTS, STEP_STRINGS };

typedef struct {
    const u8 *from;
    i64 width; /* bytes a row */
    i64 at;    /* in the template */
} patch;

typedef struct {
    i64 kind;
    const column *c;
    u8 *text;  /* a header or, for STEP_FIXED, several with gaps for the values */
    i64 size;
    patch *patches;
    i64 patch_count;
} step;

/* Bytes of the value of every row; -1 where they differ, or are too many to be copied twice. */
static i64 fixed_width(const column *c) {
    i64 width = -1;
    if (c->valid) return -1;
    if (!c->is_list) {
        if (c->value == FLOAT) width = 4;
        if (c->value == BYTES && !c->offset_width) width = c->size;
    } else if (!c->list_width && c->value == FLOAT) {
        width = 4 * c->list_size;
    }
    return width <= 64 ? width : -1;
}

static i64 step_kind(const column *c) {
    if (fixed_width(c) >= 0) return STEP_FIXED;
    if (c->is_list) return c->value == FLOAT ? STEP_FLOATS : c->value == INT64 ? STEP_INTS : STEP_STRINGS;
    return c->value == FLOAT ? STEP_FLOATS : c->value == INT64 ? STEP_INT : STEP_BYTES;
}

/* Bytes of a row that don't depend on its values: what must be free before one is begun. */
static i64 row_most(const column *columns, i64 n) {
    i64 total = 12 + 1 + 10 + 4 + 64;
    for (i64 i = 0; i < n; i++) {
        const column *c = columns + i;
        i64 width = fixed_width(c);
        total += is_short(c) && !c->is_list && c->value != BYTES ? c->key_size + 10 : header_most(c);
        total += width >= 0 ? width : 10;
    }
    return total;
}

/* Bytes that a batch takes at most, with the slack that ty_encode wants; negative for bad columns. */
EXPORT i64 ty_bound(const column *columns, i64 n, i64 rows) {
    i64 total = 0;
    for (i64 i = 0; i < n; i++) {
        const column *c = columns + i;
        if (!is_sound(c, rows)) return BAD_COLUMN;
        if (c->value == BYTES && c->is_list) total += c->items * 6;
        if (c->value == BYTES && c->offset_width && c->items) {
            i64 a = offset_at(c->offsets, c->offset_width, 0);
            i64 b = offset_at(c->offsets, c->offset_width, c->items);
            if (a < 0 || b < a || b > c->data_size) return BAD_OFFSETS;
            total += b - a;
        } else if (c->value == BYTES && !c->offset_width) {
            total += c->items * c->size;
        } else if (c->is_list) {
            total += c->items * (c->value == FLOAT ? 4 : 10);
        }
    }
    return total + (rows + 1) * row_most(columns, n);
}

static void put_program(step *steps, i64 *count, const column *columns, i64 n, u8 *text, patch *patches) {
    *count = 0;
    step *run = NULL;
    for (i64 i = 0; i < n; i++) {
        const column *c = columns + i;
        i64 kind = step_kind(c), width = fixed_width(c);
        if (kind != STEP_FIXED || !run) {
            run = steps + (*count)++;
            *run = (step){kind, c, text, 0, patches, 0};
        }
        u8 *end = text;
        if (kind == STEP_FIXED) {
            /* An empty list has no head; one value of bytes has one always. */
            end = put_header(text, c, (u64)width, width > 0 || c->value == BYTES);
            run->patches[run->patch_count++] =
                (patch){c->data, width, run->size + (end - text)};
            patches++;
            memset(end, 0, (size_t)width);
            end += width;
        } else if (kind == STEP_INT && is_short(c)) {
            end = put_header(text, c, 1, 1);
        } else if (kind == STEP_BYTES && is_short(c)) {
            end = put_header(text, c, 0, 1);
        } else if (kind == STEP_FLOATS && is_short(c) && !c->is_list) {
            end = put_header(text, c, 4, 1);
        }
        run->size += end - text;
        text = end;
        if (kind != STEP_FIXED) run = NULL;
    }
}

/* Adds to the four lengths of a short header that ends at p: list's payload, list, feature, entry. */
static inline void lengthen(u8 *start, u8 *p, u8 by) {
    p[-1] = (u8)(p[-1] + by);
    p[-3] = (u8)(p[-3] + by);
    p[-5] = (u8)(p[-5] + by);
    start[1] = (u8)(start[1] + by);
}

static inline u8 *put_fixed(u8 *p, const step *s, i64 row) {
    memcpy(p, s->text, (size_t)s->size);
    for (i64 i = 0; i < s->patch_count; i++) {
        const patch *h = s->patches + i;
        if (h->width == 4)
            memcpy(p + h->at, h->from + 4 * row, 4);
        else if (h->width)
            memcpy(p + h->at, h->from + h->width * row, (size_t)h->width);
    }
    return p + s->size;
}

static inline u8 *put_int(u8 *p, const step *s, i64 row) {
    u64 v = load64(s->c->data + 8 * row);
    if (!s->size) return put_varint(put_header(p, s->c, (u64)varint_size(v), 1), v);
    u8 *start = p;
    memcpy(p, s->text, (size_t)s->size);
    p += s->size;
    if (v < 128) {
        *p++ = (u8)v;
        return p;
    }
    u8 *end = put_varint(p, v);
    lengthen(start, p, (u8)(end - p - 1));
    return end;
}

/* `left` is what is free at p beyond what the rest of the row's headers need. */
static inline u8 *put_bytes(u8 *p, const step *s, i64 row, i64 left) {
    const u8 *from;
    i64 size;
    if (!bytes_at(s->c, row, &from, &size) || size > left) return NULL;
    if (s->size && s->text[1] + size < 128) {
        u8 *start = p;
        memcpy(p, s->text, (size_t)s->size);
        p += s->size;
        lengthen(start, p, (u8)size);
    } else {
        p = put_header(p, s->c, (u64)size, 1);
    }
    if (size) memcpy(p, from, (size_t)size);
    return p + size;
}

static u8 *put_floats(u8 *p, const step *s, i64 row, i64 left) {
    const column *c = s->c;
    if (!c->is_list) {
        if (s->size) {
            memcpy(p, s->text, (size_t)s->size);
            p += s->size;
        } else {
            p = put_header(p, c, 4, 1);
        }
        memcpy(p, c->data + 4 * row, 4);
        return p + 4;
    }
    i64 a, b;
    if (!list_at(c, row, &a, &b) || 4 * (b - a) > left) return NULL;
    p = put_header(p, c, (u64)(4 * (b - a)), b > a);
    if (b > a) memcpy(p, c->data + 4 * a, (size_t)(4 * (b - a)));
    return p + 4 * (b - a);
}

static u8 *put_ints(u8 *p, const step *s, i64 row, i64 left) {
    const column *c = s->c;
    i64 a, b;
    u64 size = 0;
    if (!list_at(c, row, &a, &b)) return NULL;
    for (i64 i = a; i < b; i++) size += (u64)varint_size(load64(c->data + 8 * i));
    if ((i64)size > left) return NULL;
    p = put_header(p, c, size, b > a);
    for (i64 i = a; i < b; i++) p = put_varint(p, load64(c->data + 8 * i));
    return p;
}

static u8 *put_strings(u8 *p, const step *s, i64 row, i64 left) {
    const column *c = s->c;
    const u8 *from;
    i64 a, b, size;
    u64 total = 0;
    if (!list_at(c, row, &a, &b)) return NULL;
    for (i64 i = a; i < b; i++) {
        if (!bytes_at(c, i, &from, &size)) return NULL;
        total += 1 + (u64)varint_size((u64)size) + (u64)size;
    }
    if ((i64)total > left) return NULL;
    p = put_header(p, c, total, 0);
    for (i64 i = a; i < b; i++) {
        bytes_at(c, i, &from, &size);
        *p++ = 0x0A;
        p = put_varint(p, (u64)size);
        if (size) memcpy(p, from, (size_t)size);
        p += size;
    }
    return p;
}

/* ---- Rows ---------------------------------------------------------------------------------------------- */

typedef struct {
    u8 *at[4];
    u64 size[4];
    int count;
} pending;

static void put_crcs(const crc_state *s, pending *q) {
#if defined(HARDWARE)
    if (s->hardware && q->count == 4) {
        u32 out[4];
        crc_hard4((const u8 *const *)q->at, q->size, out);
        for (int i = 0; i < 4; i++) put_masked(q->at[i] + q->size[i], out[i]);
        q->count = 0;
        return;
    }
#endif
    for (int i = 0; i < q->count; i++) put_masked(q->at[i] + q->size[i], crc(s, q->at[i], q->size[i]));
    q->count = 0;
}

static i64 encode_rows(const step *steps, i64 count, i64 rows, i64 row_room, u8 *out, i64 capacity, i64 *offsets,
                       const crc_state *crcs) {
    u8 *p = out;
    const u8 *end = out + capacity;
    pending q = {{0}, {0}, 0};
    i64 guess = 2; /* bytes of the Example's own length: mostly those of the row before */
    for (i64 row = 0; row < rows; row++) {
        offsets[row] = p - out;
        if (end - p < row_room) return NO_ROOM;
        u8 *record = p, *body = p + 12 + 1 + guess;
        p = body;
        for (i64 i = 0; i < count; i++) {
            const step *s = steps + i;
            if (s->kind == STEP_FIXED) {
                p = put_fixed(p, s, row);
                continue;
            }
            if (!is_valid(s->c, row)) continue;
            i64 left = end - p - row_room;
            switch (s->kind) {
                case STEP_INT: p = put_int(p, s, row); break;
                case STEP_BYTES: p = put_bytes(p, s, row, left); break;
                case STEP_FLOATS: p = put_floats(p, s, row, left); break;
                case STEP_INTS: p = put_ints(p, s, row, left); break;
                default: p = put_strings(p, s, row, left); break;
            }
            if (!p) return BAD_OFFSETS;
        }
        u64 size = (u64)(p - body);
        i64 width = varint_size(size);
        if (width != guess) {
            memmove(record + 13 + width, body, size);
            p += width - guess;
            guess = width;
        }
        record[12] = 0x0A;
        put_varint(record + 13, size);
        u64 length = 1 + (u64)width + size;
        memcpy(record, &length, 8);
        put_masked(record + 8, crc(crcs, record, 8));
        q.at[q.count] = record + 12;
        q.size[q.count++] = length;
        p += 4;
        if (q.count == 4) put_crcs(crcs, &q);
    }
    put_crcs(crcs, &q);
    offsets[rows] = p - out;
    return p - out;
}

/* Encode all rows of a batch; bytes written, or a negative code. `offsets` takes rows + 1 record starts. */
EXPORT i64 ty_encode(const column *columns, i64 n, i64 rows, u8 *out, i64 capacity, i64 *offsets, int hardware) {
    i64 text = 1;
    for (i64 i = 0; i < n; i++) {
        if (!is_sound(columns + i, rows)) return BAD_COLUMN;
        i64 width = fixed_width(columns + i);
        text += header_most(columns + i) + (width > 0 ? width : 0);
    }
    size_t steps_size = (size_t)(n + 1) * sizeof(step), patches_size = (size_t)(n + 1) * sizeof(patch);
    u8 *memory = malloc(steps_size + patches_size + sizeof(crc_state) + (size_t)text);
    if (!memory) return NO_MEMORY;
    step *steps = (step *)memory;
    patch *patches = (patch *)(memory + steps_size);
    crc_state *crcs = (crc_state *)(memory + steps_size + patches_size);
    i64 count;
    crc_init(crcs, hardware);
    put_program(steps, &count, columns, n, (u8 *)(crcs + 1), patches);
    i64 written = encode_rows(steps, count, rows, row_most(columns, n), out, capacity, offsets, crcs);
    free(memory);
    return written;
}

/* CRC-32C of some bytes, by the CPU's instruction or, when `hardware` is 0 or there is none, by tables. */
EXPORT u32 ty_crc32c(const u8 *data, i64 size, int hardware) {
    crc_state s;
    crc_init(&s, hardware);
    return crc(&s, data, (u64)size);
}

/* SHA-256 of this file, as far as the build says: a library of another version is not used. */
EXPORT const char *ty_source(void) { return TY_SOURCE; }
